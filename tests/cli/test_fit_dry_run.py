"""`kvfold fit --recipe FILE --dry-run`."""

from __future__ import annotations

import json

import pytest
import yaml


def flat(done):
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def recipe_file(tiny_folder, tmp_path):
    def write(**keys):
        whole = {
            "name": "a tiny one",
            "model": str(tiny_folder),
            "plan": {"preset": "csa2", "anchors": 2, "window": 6},
            "text": [{"source": "${DATA}/nowhere.txt", "tokens": 2048}],
            "seq": 64,
            "held_out": 256,
            "stages": [{"stage": "closed-form"}, {"stage": "distil", "steps": 4}],
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**whole, **keys}))
        return path

    return write


@pytest.fixture
def dry_run(kvfold):
    """`dry_run(recipe, *more)`, at a stated rate, so that nothing has to be measured."""

    def run(path, *more):
        rate = ("--operations-per-second", "1e9")
        return kvfold("fit", "--recipe", path, "--dry-run", "--device", "cpu", *rate, *more)

    return run


def test_every_stage_is_told_from_the_configuration_alone(
    dry_run, recipe_file, tiny_folder, tmp_path
):
    config = tmp_path / "only-config"
    config.mkdir()
    (config / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    figures = tmp_path / "figures.json"
    done = dry_run(recipe_file(), config, "--json", figures)
    assert done.exit_code == 0, done.output
    told = json.loads(figures.read_text())
    assert [stage["stage"] for stage in told["stages"]] == ["closed-form", "distil"]
    for stage in told["stages"]:
        assert sum(stage["components"].values()) == stage["peak_bytes"] > told["base_bytes"]
        assert stage["seconds"] == pytest.approx(sum(stage["operations"].values()) / 1e9)
    words = flat(done)
    for said in ("closed-form", "distil", "base weights", "1e+09 operations a second"):
        assert said in words
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "figures.json",
        "only-config",
        "recipe.yaml",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize("way", ["option", "recipe"])
def test_too_much_memory_ends_with_an_error_that_says_what_is_needed(dry_run, recipe_file, way):
    if way == "option":
        done = dry_run(recipe_file(), "--memory-limit", "0.1GiB")
    else:
        done = dry_run(recipe_file(memory_limit="0.1GiB"))
    assert done.exit_code == 2
    assert "must run within 102.4 MiB" in flat(done)
    assert "Traceback" not in done.output
    assert dry_run(recipe_file(memory_limit="0.1GiB"), "--memory-limit", "4GiB").exit_code == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--out", "x"), "--output is not for a dry run"),
        (("--tokens", 5), "--tokens is not for a dry run"),
        (("--memory-limit", "much"), "such as 24GiB"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(dry_run, recipe_file, more, words):
    done = dry_run(recipe_file(), *more)
    assert done.exit_code == 2
    assert words in flat(done)


def test_its_options_are_refused_elsewhere(kvfold, recipe_file, tmp_path):
    path = recipe_file()
    done = kvfold("fit", "--recipe", path, "--out", tmp_path / "a", "--machine", "l4")
    assert done.exit_code == 2
    assert "--machine is for a --dry-run" in flat(done)
    assert "name one" in flat(kvfold("fit", "m", "--dry-run"))
    assert "--out DIR" in flat(kvfold("fit", "--recipe", path))


def test_a_machine_that_is_not_here_is_assumed_aloud_and_else_there_is_no_time(
    kvfold, recipe_file, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = ("fit", "--recipe", recipe_file(), "--dry-run", "--device", "cuda")
    assumed = kvfold(*run, "--machine", "rtx-4090")
    assert assumed.exit_code == 0, assumed.output
    assert "rtx-4090: 40% of its published 165" in flat(assumed)
    assert "time is not known" in flat(kvfold(*run))
