"""`kvfold fit --recipe`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import kvfold as package
from kvfold.store.addon import AddOn

PLAN = {
    "anchors": 2,
    "window": 6,
    "depth": [{"method": "latent", "layers": [1, 2, 3, 4], "rank": 64}],
    "sequence": [{"method": "pool", "layers": [1, 2, 3, 4], "group": 2, "gate": "head"}],
}


def flat(done):
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def recipe_file(tiny_folder, text_file, tmp_path):
    """`recipe_file(**keys)`: a recipe on disk, its text as `${DATA}/text.txt`."""

    def write(**keys):
        whole = {
            "name": "a tiny one",
            "model": str(tiny_folder),
            "plan": PLAN,
            "text": [{"source": f"${{DATA}}/{text_file.name}"}],
            "seq": 64,
            "held_out": 256,
            "stages": [
                {"stage": "closed-form", "tokens": 2048},
                {"stage": "gates", "steps": 4, "moves": 2, "queries": 16},
            ],
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**whole, **keys}))
        return path

    return write


@pytest.fixture
def fit(kvfold, text_file, tmp_path):
    """`fit(recipe, *more)`: run it, the data folder being that of the text."""

    def run(path, *more, output="out"):
        return kvfold(
            "fit", "--recipe", path, "--data", text_file.parent, "--out", tmp_path / output, *more
        )

    return run


def test_a_recipe_leaves_an_addon_with_its_card_and_says_what_each_stage_brought(
    fit, recipe_file, tmp_path
):
    figures, log = tmp_path / "report.json", tmp_path / "run.jsonl"
    done = fit(recipe_file(), "--json", figures, "--log", log)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "addon.json",
        "addon.safetensors",
        "kvfold-quality.png",
    ]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", "recipe.yaml", "report.json", "run.jsonl"}
    report = AddOn.from_pretrained(folder).report
    assert json.loads(figures.read_text()) == report
    lines = [line.split() for line in done.stdout.splitlines()]
    for stage in report["stages"]:
        row = next(line for line in lines if line[:1] == [stage["name"]])
        before, after = (f"{stage[key]:.4f}" for key in ("kl_before", "kl_after"))
        assert row[3:5] == [before, after]
        assert row[6].startswith("yes" if stage["kept"] else "no")
    words = flat(done)
    for said in ("Recipe: a tiny one", "Plan: latent", "on 256 held-out tokens", "gate error"):
        assert said in words
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [e["event"] for e in events if "event" in e] == ["begin", "end", "end"]
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_an_interrupted_run_goes_on_and_a_new_one_starts_anew(
    fit, recipe_file, tmp_path, monkeypatch
):
    from kvfold.fitting.gates import GateTrainer

    path, log = recipe_file(), tmp_path / "run.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(GateTrainer, "step", lambda *_: 1 / 0)
        assert isinstance(fit(path, "--log", log).exception, ZeroDivisionError)
    assert (tmp_path / "out.work").is_dir()
    assert not (tmp_path / "out").exists()
    done = fit(path, "--resume", "--log", log)
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [e["event"] for e in events if "event" in e] == ["begin", "end", "go on", "end"]
    assert not (tmp_path / "out.work").exists()
    assert "Going on. Stages kept as they are: closed-form; to be done: gates" in flat(done)
    (tmp_path / "other.work").mkdir()
    (tmp_path / "other.work" / "state.json").write_text("{}")
    refused = fit(path, "--resume", output="other")
    assert refused.exit_code == 2
    assert "can't be read" in flat(refused)
    refused = fit(path, output="other")
    assert refused.exit_code == 2
    assert "an interrupted run is in" in flat(refused)
    anew = fit(path, "--force", output="other")
    assert anew.exit_code == 0, anew.output


def test_what_is_kept_of_a_recipe_that_was_corrected_is_told(
    fit, recipe_file, tmp_path, monkeypatch
):
    from kvfold.fitting.gates import GateTrainer

    with monkeypatch.context() as patched:
        patched.setattr(GateTrainer, "step", lambda *_: 1 / 0)
        fit(recipe_file())
    gates = {"stage": "gates", "steps": 2, "moves": 2, "queries": 16}
    stages = [{"stage": "closed-form", "tokens": 2048}, gates]
    done = fit(recipe_file(stages=stages), "--resume")
    assert done.exit_code == 0, done.output
    assert (
        "Stages kept as they are: closed-form; to be done: gates; changed: stage 2, gates: "
        "steps: 4 -> 2" in flat(done)
    )
    report = AddOn.from_pretrained(tmp_path / "out").report
    assert [stage["report"].get("steps") for stage in report["stages"]] == [None, 2]


def test_a_folder_of_somebody_elses_is_not_worked_in(fit, recipe_file, tmp_path):
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "thesis.txt").write_text("precious")
    refused = fit(recipe_file(), "--force")
    assert refused.exit_code == 2
    assert "holds something else" in flat(refused)
    assert (tmp_path / "out.work" / "thesis.txt").read_text() == "precious"


def test_model_and_dtype_may_be_others_than_the_recipes(fit, recipe_file, tiny_folder, tmp_path):
    done = fit(recipe_file(model="no-such-folder/"), tiny_folder, "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    addon = AddOn.from_pretrained(tmp_path / "out")
    assert str(next(addon.parameters()).dtype) == "torch.bfloat16"
    assert addon.report["recipe"]["model"] == str(tiny_folder)
    assert addon.report["recipe"]["dtype"] == "bfloat16"


def test_a_readme_of_ones_own_is_kept(fit, recipe_file, tmp_path):
    path = recipe_file(stages=["closed-form"])
    assert fit(path).exit_code == 0
    (tmp_path / "out" / "README.md").write_text("mine")
    done = fit(path, "--force")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    assert "no model card was written" in flat(done)


@pytest.mark.slow
def test_two_processes_make_one_addon_and_one_of_them_speaks(recipe_file, text_file, tmp_path):
    pytest.importorskip("accelerate", reason="pip install 'kvfold[train]'")
    arguments = ["fit", "--recipe", recipe_file(), "--data", text_file.parent]
    arguments += ["--out", tmp_path / "two", "--log", tmp_path / "log.jsonl", "--device", "cpu"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "--", "kvfold", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Recipe: a tiny one") == 1
    stages = AddOn.from_pretrained(tmp_path / "two").report["stages"]
    assert [stage["name"] for stage in stages] == ["closed-form", "gates"]
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    steps = [json.loads(line).get("step") for line in lines]
    assert [step for step in steps if step] == [1, 2, 3, 4]
    assert not (tmp_path / "two.work").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--preset", "ced"), "--preset is said by the recipe"),
        (("--tokens", 5), "--tokens is said by the recipe"),
        (("--gate-steps", 5), "--gate-steps is said by the recipe"),
        (("--state-projector",), "--state-projector is said by the recipe"),
        (("--device", "moon"), "moon"),
    ],
)
def test_options_that_the_recipe_says_are_refused(fit, recipe_file, tmp_path, more, words):
    done = fit(recipe_file(), *more)
    assert done.exit_code == 2
    assert words in flat(done)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name a MODEL, or a --recipe FILE"),
        (("m", "--data", "."), "--data is for --recipe FILE"),
        (("m", "--log", "x"), "--log is for --recipe FILE"),
        (("m", "--track", "trackio"), "--track is for --recipe FILE"),
        (("--recipe", "no-such.yaml"), "no-such.yaml"),
    ],
)
def test_what_is_missing_or_too_much_is_said(kvfold, tmp_path, arguments, words):
    done = kvfold("fit", *arguments, "-o", tmp_path / "a")
    assert done.exit_code == 2
    assert words in flat(done)
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_missing_data_folder_is_asked_for_before_weights_are_read(
    kvfold, recipe_file, tmp_path, monkeypatch
):
    monkeypatch.setattr("kvfold.cli.fit_recipe.load_model", None)
    done = kvfold("fit", "--recipe", recipe_file(), "--out", tmp_path / "a")
    assert done.exit_code == 2
    assert "--data FOLDER" in flat(done)
