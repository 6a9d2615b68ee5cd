"""A recipe's stages: each measured, kept only if it helped, and gone on with where it stopped."""

from __future__ import annotations

import dataclasses
import json
from types import MappingProxyType

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.errors import FitError, RecipeError
from kvfold.fitting import closed_form, descent, distil, gates, recipe, stage_table, stages
from kvfold.fitting.closed_form import ClosedFormSettings
from kvfold.fitting.held_out import HeldOut
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.stage_table import STAGES, StageKind
from kvfold.fitting.stages import recipe_text
from kvfold.store.addon import AddOn

from .tiny_recipes import (
    PLAN,
    Letters,
    Stop,
    made_recipe,
    run,
    same_weights,
    stopping,
    untimed,
)


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    return run(model, data, tmp_path_factory.mktemp("whole"))


def test_every_stage_is_measured_and_what_it_brought_is_reported(whole):
    report = whole.report
    assert [stage["name"] for stage in report["stages"]] == ["closed-form", "gates"]
    first, second = report["stages"]
    assert first["kept"] and first["kl_after"] < first["kl_before"]
    assert second["kl_before"] == first["kl_after"]
    assert second["settings"]["steps"] == 8
    assert second["report"]["steps"] == 8
    last = [stage["kl_after"] for stage in report["stages"] if stage["kept"]][-1]
    assert report["held_out"]["folded"]["kl"] == last
    assert report["held_out"]["dropped"]["kl"] > last
    assert report["held_out"]["base"]["kl"] == 0
    assert report["data"]["parts"] == [
        {
            "source": "${DATA}/sums.jsonl",
            "weight": 1.0,
            "tokens": report["data"]["parts"][0]["tokens"],
        }
    ]
    assert report["data"]["held_out_tokens"] == 240
    assert Recipe.from_dict(report["recipe"]) == made_recipe()
    assert set(report["layers"]) == {"1", "2", "3", "4"}


def test_the_reported_figures_are_those_of_the_addon(model, data, tmp_path, whole):
    whole.save_pretrained(tmp_path / "a")
    addon = AddOn.from_pretrained(tmp_path / "a", dtype=model.dtype)
    text = recipe_text(made_recipe(), model, Letters(), tmp_path, data=data)
    measured = HeldOut(model, text.held_out).measure("again", addon)
    assert measured.kl == whole.report["held_out"]["folded"]["kl"]
    assert addon.report == json.loads(json.dumps(whole.report))


def test_rows_do_not_depend_on_where_the_data_folder_is(model, data, tmp_path, whole):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sums.jsonl").write_bytes((data / "sums.jsonl").read_bytes())
    moved = run(model, tmp_path / "data", tmp_path / "work")
    assert moved.report["data"] == whole.report["data"]
    assert same_weights(moved, whole)


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (closed_form, "capture", 0),
        (closed_form, "capture", 1),
        (gates.GateTrainer, "step", 0),
        (gates.GateTrainer, "step", 5),
        (HeldOut, "measure", 0),
        (HeldOut, "measure", 1),
        (HeldOut, "measure", 2),
        (stages, "write_json", 0),
        (stages, "write_json", 1),
        (stages, "report_fit", 0),
    ],
)
def test_a_killed_and_resumed_run_is_an_unbroken_one(
    model, data, tmp_path, monkeypatch, whole, owner, name, after
):
    with monkeypatch.context() as patched:
        stopping(patched, owner, name, after)
        with pytest.raises(Stop):
            run(model, data, tmp_path / "work")
    resumed = run(model, data, tmp_path / "work")
    assert same_weights(resumed, whole)
    assert untimed(resumed.report) == untimed(whole.report)


ALL_STAGES = [
    {"stage": "closed-form", "tokens": 1920},
    {"stage": "gates", "steps": 2, "queries": 16},
    {"stage": "refine", "steps": 6, "look_every": 2, "queries": 16, "learning_rate": 1e-3},
    {"stage": "distil", "steps": 6, "rows": 1, "look_every": 2, "learning_rate": 1e-3},
]


@pytest.fixture(scope="module")
def all_stages(model, data, tmp_path_factory):
    return run(model, data, tmp_path_factory.mktemp("all"), made_recipe(stages=ALL_STAGES))


def test_every_stage_of_the_table_runs_and_what_is_kept_is_the_best(all_stages):
    report = all_stages.report
    assert [stage["name"] for stage in report["stages"]] == list(STAGES)
    measured = [stage["kl_after"] for stage in report["stages"]]
    assert report["held_out"]["folded"]["kl"] == min(measured)
    assert report["stages"][3]["report"]["steps"] == 6
    assert report["stages"][3]["kept"]


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [(descent.AttentionDescent, "step", 5), (distil.Distiller, "step", 3)],
)
def test_a_run_killed_in_refining_or_distilling_ends_as_an_unbroken_one(
    model, data, tmp_path, monkeypatch, all_stages, owner, name, after
):
    chosen = made_recipe(stages=ALL_STAGES)
    with monkeypatch.context() as patched:
        stopping(patched, owner, name, after)
        with pytest.raises(Stop):
            run(model, data, tmp_path / "work", chosen)
    resumed = run(model, data, tmp_path / "work", chosen)
    assert same_weights(resumed, all_stages)
    assert untimed(resumed.report) == untimed(all_stages.report)


def test_finished_stages_are_not_run_again(model, data, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stopping(patched, gates.GateTrainer, "step", 6)
        with pytest.raises(Stop):
            run(model, data, tmp_path / "work")
    steps = []
    real = gates.GateTrainer.step
    monkeypatch.setattr(closed_form, "capture", None)
    monkeypatch.setattr(
        gates.GateTrainer, "step", lambda self, *a: (steps.append(1), real(self, *a))
    )
    run(model, data, tmp_path / "work")
    assert len(steps) == 2


@dataclasses.dataclass(frozen=True)
class NoiseSettings:
    size: float = 1.0


def add_noise(model, addon, mixture, held_out, settings, *, log, **options):
    """A stage that makes things worse, or useless."""
    with torch.no_grad():
        for weight in addon.parameters():
            weight.add_(settings.size * torch.randn(weight.shape, generator=torch.Generator()))
    log({"noise": settings.size})
    return {"noise": settings.size}


@pytest.fixture
def with_noise(monkeypatch):
    table = MappingProxyType({**STAGES, "noise": StageKind(NoiseSettings, add_noise)})
    for module in (recipe, stage_table):
        monkeypatch.setattr(module, "STAGES", table)


@pytest.mark.parametrize(
    ("size", "why"), [(2.0, "held-out KL got worse"), (1e30, "must be finite")]
)
def test_a_stage_that_made_it_worse_is_not_kept(model, data, tmp_path, with_noise, size, why):
    worse = made_recipe(stages=["closed-form", {"stage": "noise", "size": size}])
    before = run(model, data, tmp_path / "calm", made_recipe(stages=["closed-form"]))
    after = run(model, data, tmp_path / "worse", worse)
    assert same_weights(before, after)
    stage = after.report["stages"][1]
    assert not stage["kept"]
    assert why in stage["why"]
    assert (stage["kl_after"] is None) == (size > 2)
    assert after.report["held_out"] == before.report["held_out"]


def test_a_new_stage_is_one_line_in_the_table(model, data, tmp_path, with_noise):
    lines = []
    chosen = made_recipe(stages=["closed-form", {"stage": "noise", "size": 0.0}])
    made = run(model, data, tmp_path / "work", chosen, log=lines.append)
    stage = made.report["stages"][1]
    assert (stage["kept"], stage["why"]) == (False, "it brought nothing")
    assert stage["settings"] == {"size": 0.0}
    assert {"stage": "noise", "number": 2, "noise": 0.0} in lines
    assert [line.get("event") for line in lines if "event" in line] == ["begin", "end", "end"]


def test_the_log_has_a_line_for_each_step_and_each_end(model, data, tmp_path):
    lines = []
    run(model, data, tmp_path / "work", log=lines.append)
    steps = [line["step"] for line in lines if line.get("stage") == "gates"]
    assert steps == list(range(1, 9))
    assert [line["name"] for line in lines if line.get("event") == "end"] == [
        "closed-form",
        "gates",
    ]
    assert json.loads(json.dumps(lines)) == lines


def test_another_recipes_work_folder_is_refused(model, data, tmp_path):
    run(model, data, tmp_path / "work")
    with pytest.raises(FitError, match="another recipe, model or text"):
        run(model, data, tmp_path / "work", made_recipe(seed=9))
    (tmp_path / "work" / "state.json").write_text("{")
    with pytest.raises(FitError, match="can't be read"):
        run(model, data, tmp_path / "work")


def test_a_stage_without_anything_to_do_is_refused_before_any_work(model, data, tmp_path):
    chosen = made_recipe(plan={"window": 6, "depth": PLAN["depth"]})
    with pytest.raises(FitError, match="this plan has none"):
        run(model, data, tmp_path / "work", chosen)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_data_folder_is_asked_for(model, tmp_path):
    with pytest.raises(RecipeError, match="--data FOLDER"):
        run(model, None, tmp_path / "work")


def test_plans_that_skip_prompts_are_measured_without_skipping(tiny_model, data, tmp_path):
    model = tiny_model("qwen3_5", vocab_size=160)
    plan = {
        "anchors": 2,
        "window": 6,
        "depth": [{"method": "ced", "split": 4, "layers": [7]}],
        "prefill": "skip",
        "replay": 8,
        "state_projector": True,
    }
    made = run(model, data, tmp_path / "work", made_recipe(plan=plan, stages=["closed-form"]))
    assert made.plan.prefill == "skip"
    assert made.state_projector.kept
    stage = made.report["stages"][0]
    assert stage["kl_after"] < stage["kl_before"]
    assert set(stage["report"]) == {"fit", "state_projector"}


def test_the_closed_form_takes_so_many_tokens(model, data, tmp_path):
    text = recipe_text(made_recipe(), model, Letters(), tmp_path, data=data)
    addon = AddOn.untrained(model, made_recipe().plan_for(anatomy(model)))
    settings = ClosedFormSettings(tokens=1000)
    made = closed_form.closed_form_stage(
        model, addon, text.mixture, text.held_out, settings, progress=False
    )
    assert made["fit"]["tokens"] == 20 * 48
    assert not any(weight.requires_grad for weight in addon.parameters())
