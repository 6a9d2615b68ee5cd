"""A run that goes on: with stages that were changed since, and with the time of all its runs."""

from __future__ import annotations

import json
import time

import pytest

from kvfold.errors import FitError
from kvfold.fitting import closed_form, distil, gates, stages
from kvfold.fitting.held_out import HeldOut
from kvfold.fitting.run_state import stage_keys

from .tiny_recipes import (
    Stop,
    made_recipe,
    run,
    same_weights,
    stopping,
    untimed,
)

CLOSED = {"stage": "closed-form", "tokens": 3840}
GATES = {"stage": "gates", "steps": 4, "queries": 16}
DISTIL = {"stage": "distil", "steps": 4, "rows": 1, "look_every": 2, "learning_rate": 1e-3}
BEFORE = [CLOSED, GATES, DISTIL]
CHANGED = [CLOSED, GATES, {**DISTIL, "learning_rate": 2e-3}]


@pytest.fixture(scope="module")
def unbroken(model, data, tmp_path_factory):
    return run(model, data, tmp_path_factory.mktemp("whole"), made_recipe(stages=CHANGED))


def stopped(model, data, work, monkeypatch, owner, name, after, chosen):
    with monkeypatch.context() as patched:
        stopping(patched, owner, name, after)
        with pytest.raises(Stop):
            run(model, data, work, chosen)


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (distil.Distiller, "step", 3),  # a checkpoint of the old settings is there
        (HeldOut, "measure", 3),  # the stage has run, and was not measured
        (stages, "report_fit", 0),  # all stages are over
    ],
)
def test_stages_before_a_changed_one_are_kept_and_the_end_is_that_of_the_new_recipe(
    model, data, tmp_path, monkeypatch, unbroken, owner, name, after
):
    work, lines = tmp_path / "work", []
    old, new = made_recipe(stages=BEFORE), made_recipe(stages=CHANGED)
    stopped(model, data, work, monkeypatch, owner, name, after, old)
    monkeypatch.setattr(closed_form, "capture", None)
    monkeypatch.setattr(gates.GateTrainer, "step", None)
    made = run(model, data, work, new, log=lines.append)
    assert same_weights(made, unbroken)
    assert untimed(made.report) == untimed(unbroken.report)
    (told,) = (line for line in lines if line.get("event") == "go on")
    assert told["stages_done"] == 2
    assert told["stages"] == ["closed-form", "gates", "distil"]
    assert told["changed"] == ["stage 3, distil: learning_rate: 0.001 -> 0.002"]


def test_stages_may_be_put_between_taken_out_or_put_behind(model, data, tmp_path, monkeypatch):
    work, lines = tmp_path / "work", []
    stopped(model, data, work, monkeypatch, stages, "report_fit", 0, made_recipe(stages=BEFORE))
    fewer = made_recipe(stages=[CLOSED, DISTIL])
    monkeypatch.setattr(closed_form, "capture", None)
    made = run(model, data, work, fewer, log=lines.append)
    assert [stage["name"] for stage in made.report["stages"]] == ["closed-form", "distil"]
    assert lines[0]["stages_done"] == 1
    assert lines[0]["changed"] == ["stage 2: gates -> distil", "stage 3: distil -> none"]
    monkeypatch.setattr(gates.GateTrainer, "step", None)
    back = run(model, data, work, made_recipe(stages=[CLOSED, GATES]), log=lines.append)
    assert [stage["name"] for stage in back.report["stages"]] == ["closed-form", "gates"]


def test_a_new_name_or_memory_limit_is_no_other_run(model, data, tmp_path, monkeypatch):
    work = tmp_path / "work"
    old = made_recipe(stages=[CLOSED])
    stopped(model, data, work, monkeypatch, stages, "report_fit", 0, old)
    monkeypatch.setattr(closed_form, "capture", None)
    made = run(model, data, work, made_recipe(stages=[CLOSED], name="b", memory_limit="4GiB"))
    assert made.report["recipe"]["name"] == "b"


def test_what_all_stages_share_can_not_change_and_is_named(model, data, tmp_path, monkeypatch):
    old = made_recipe(stages=[CLOSED])
    stopped(model, data, tmp_path / "work", monkeypatch, stages, "report_fit", 0, old)
    with pytest.raises(FitError, match=r"another recipe, model or text \(seed: 0 -> 9\)"):
        run(model, data, tmp_path / "work", made_recipe(stages=[CLOSED], seed=9))


def test_a_stages_key_depends_on_it_and_on_those_before_it():
    old, new = (stage_keys(made_recipe(stages=chosen)) for chosen in (BEFORE, CHANGED))
    assert old[:2] == new[:2]
    assert old[2] != new[2]
    first = stage_keys(made_recipe(stages=[{**CLOSED, "tokens": 960}, GATES, DISTIL]))
    assert not set(first) & set(old)


@pytest.mark.parametrize(
    ("number", "owner", "name", "after"),
    [
        (0, closed_form.ClosedForm, "take", 2),
        (1, gates.GateTrainer, "step", 3),
        (2, distil.Distiller, "step", 3),
    ],
)
def test_the_time_of_a_stage_is_that_of_all_its_runs(
    model, data, tmp_path, monkeypatch, number, owner, name, after
):
    """Each unit of work takes 0.05 s more; two are behind the checkpoint that is gone on from."""
    real, slow = getattr(owner, name), 0.05

    def slower(*args, **kwargs):
        time.sleep(slow)
        return real(*args, **kwargs)

    work = tmp_path / "work"
    chosen = made_recipe(stages=BEFORE[: number + 1])
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, slower)
        stopped(model, data, work, patched, owner, name, after, chosen)
        (left,) = work.glob("*.checkpoint")
        assert stages.seconds_in(left) >= 2 * slow
    made = run(model, data, work, chosen)
    last = made.report["stages"][-1]
    assert last["seconds"] >= 2 * slow
    own = last["report"]["fit"] if number == 0 else last["report"]
    assert own["seconds"] >= 2 * slow


def test_a_checkpoint_that_cannot_be_read_counts_for_no_time(tmp_path):
    (tmp_path / "torn.checkpoint").write_bytes(b"PK")
    assert stages.seconds_in(tmp_path / "torn.checkpoint") == 0.0
    assert stages.seconds_in(tmp_path / "none.checkpoint") == 0.0
    (tmp_path / "other.checkpoint").write_text(json.dumps({}))
    assert stages.seconds_in(tmp_path / "other.checkpoint") == 0.0
