"""A damaged run folder is told with the file at fault, and never shown as something else."""

from __future__ import annotations

import json
import shutil

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.cost import CostSettings, write_cost
from kvfold.evaluation.page.html import render_page
from kvfold.evaluation.page.markdown import render_markdown
from kvfold.evaluation.page.runs import read_run
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.suite import Suite, run_suite
from kvfold.plan import Plan

from ..suite_tasks import NextTokenTask

PLAN = Plan.from_dict(
    {"anchors": 2, "window": 4, "depth": [{"method": "csa2", "source": 3, "readers": [4, 5]}]}
)
SETTINGS = CostSettings(lengths=(64,), speed_lengths=())


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def sound(model, bare_addon, tmp_path_factory):
    """A finished run of one task with its cost."""
    folder = tmp_path_factory.mktemp("sound")
    candidates = {"a": bare_addon(model, PLAN)}
    run_suite(Suite(model, None, candidates, [NextTokenTask("needle", items=3)]), folder)
    write_cost(folder, model, candidates, SETTINGS)
    return folder


def changed(path, *keys, to):
    """Put something else into the place that keys lead to."""
    data = json.loads(path.read_text())
    entry = data
    for key in keys[:-1]:
        entry = entry[key]
    if to is None:
        del entry[keys[-1]]
    else:
        entry[keys[-1]] = to
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("file", "keys", "to", "words"),
    [
        ("run.json", ("machine",), None, "machine"),
        ("run.json", ("config",), [], "config"),
        ("run.json", ("model",), 3, "model"),
        ("metrics.json", ("subjects",), None, "subjects"),
        ("metrics.json", ("plain",), "b", "'b' has none"),
        ("metrics.json", ("results", PLAIN, "needle"), None, "figures of every task"),
        ("metrics.json", ("results", "a", "needle", "acc", "value"), "1", "value"),
        ("metrics.json", ("results", "a", "needle", "acc", "interval"), 3, "interval"),
        ("cost.json", ("subjects", "a", "memory"), None, "memory"),
        ("cost.json", ("subjects", "a", "memory"), [], "the same lengths"),
        ("predictions/a/needle.config.json", ("code",), [{}], "commit"),
        ("predictions/a/needle.config.json", ("code",), {"commit": "x"}, "code"),
        ("predictions/a/needle.config.json", ("configuration", "addon", "plan"), {}, "anchors"),
    ],
)
def test_what_a_file_lacks_is_told(sound, tmp_path, file, keys, to, words):
    folder = shutil.copytree(sound, tmp_path / "run")
    changed(folder / file, *keys, to=to)
    with pytest.raises(EvaluationError, match=f"{file} is not as kvfold writes it: .*{words}"):
        read_run(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe{\n", b"[]\n", b'{"item": "x"}\n', b"[" * 100_000])
def test_needles_that_are_no_answers_are_told_by_line(sound, tmp_path, content):
    folder = shutil.copytree(sound, tmp_path / "run")
    path = folder / "predictions/a/needle.jsonl"
    path.write_bytes(b"".join([*path.read_bytes().splitlines(keepends=True)[:1], content]))
    with pytest.raises(EvaluationError, match=r"needle\.jsonl:2 "):
        read_run(folder)


@pytest.mark.parametrize("name", ["run.json", "cost.json", "predictions/a/needle.jsonl"])
def test_a_folder_in_place_of_a_file_is_told(sound, tmp_path, name):
    folder = shutil.copytree(sound, tmp_path / "run")
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(EvaluationError, match=name):
        read_run(folder)


def test_the_cost_of_another_configuration_is_left_out_and_told(sound, model, bare_addon, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "run")
    assert read_run(folder).cost and not read_run(folder).other_cost
    other = {"a": bare_addon(model, PLAN.replace(anchors=1))}
    run_suite(Suite(model, None, other, [NextTokenTask("needle", items=3)]), folder)
    run = read_run(folder)  # as after a kill before the cost was measured
    assert run.cost == {} and run.sizes() is None
    for made in (render_page([run]), render_markdown([run])):
        assert "was measured of another configuration" in made
    write_cost(folder, model, other, SETTINGS)
    assert read_run(folder).sizes()[1].keys() == {PLAIN, "a"}
    assert "another configuration" not in render_page([read_run(folder)])


def test_the_cost_of_other_subjects_is_left_out(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "run")
    changed(folder / "cost.json", "subjects", "a", to=None)
    assert read_run(folder).other_cost


def test_a_cost_without_answers_beside_it_is_shown(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "run")
    shutil.rmtree(folder / "predictions")
    assert read_run(folder).cost
