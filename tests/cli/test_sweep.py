"""`kvfold sweep`."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def sweep(kvfold, long_text_file):
    def run(model, *more):
        return kvfold(
            "sweep", model, "--data", long_text_file, "--tokens", 2048, "--prompt", 96,
            "--continuation", 16, "--prompts", 2, "--window", 8, "--replays", "16,32", *more,
        )  # fmt: skip

    return run


def flat(done):
    """What a command printed, without the frames and line breaks of the terminal."""
    return " ".join(done.output.replace("│", " ").split())


def test_every_setting_is_measured_and_the_verdict_given(sweep, tiny_folder, tmp_path):
    files = ("--json", tmp_path / "s.json", "--plot", tmp_path / "s.svg")
    done = sweep(tiny_folder, "--splits", "3,2", *files)
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "s.json").read_text())
    names = [result["name"] for result in data["results"]]
    assert names == [
        "no compression",
        *(
            f"split {split}, {how}"
            for split in (2, 3)
            for how in ("nothing skipped", "replay 16", "replay 32")
        ),
    ]
    assert data["config"]["splits"] == [2, 3]
    assert (data["prompt"], data["continuation"], data["windows"]) == (96, 16, 2)
    left = [result["operations_left"] for result in data["results"][4:]]
    assert left == pytest.approx([1.0, 0.5 + 0.5 / 6, 0.5 + 0.5 / 3])
    assert all(result["prefill_seconds"] > 0 for result in data["results"])
    assert data["cheapest"] in (None, *names)
    assert ("* cheapest within 3%" in flat(done)) == (data["cheapest"] is not None)
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert (tmp_path / "s.svg").read_text().startswith("<?xml")


def test_a_hybrid_is_measured_with_and_without_projected_states(sweep, hybrid_folder, tmp_path):
    more = ("--splits", "4", "--replays", "16", "--no-speed", "--json", tmp_path / "s.json")
    done = sweep(hybrid_folder, *more)
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "s.json").read_text())["results"][2:]
    assert [result["name"] for result in results] == [
        "split 4, replay 16",
        "split 4, replay 16 + states",
    ]
    assert [result["plan"]["state_projector"] for result in results] == [False, True]
    assert results[0]["losses"] != results[1]["losses"]
    assert results[0]["prefill_seconds"] is None


def test_layers_may_read_from_others_and_splits_are_found(sweep, sliding_folder, tmp_path):
    more = ("--method", "csa2", "--no-speed", "--json", tmp_path / "s.json")
    done = sweep(sliding_folder, *more)
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "s.json").read_text())
    assert data["config"]["splits"] == [4]
    methods = [entry["method"] for entry in data["results"][1]["plan"]["depth"]]
    assert methods == ["ced", "csa2"]


def test_text_to_fit_on_is_not_measured_on(sweep, tiny_folder, long_text_file, monkeypatch):
    from kvfold.evaluation import prompt_runner
    from kvfold.fitting import together

    seen = {}
    fit, measure = together.fit_together, prompt_runner.evaluate_prompts

    def fitting(model, plans, tokens):
        seen["fit"] = tokens
        return fit(model, plans, tokens)

    def measuring(model, candidates, windows, continuation, **more):
        seen["measure"] = windows
        return measure(model, candidates, windows, continuation, **more)

    monkeypatch.setattr(together, "fit_together", fitting)
    monkeypatch.setattr(prompt_runner, "evaluate_prompts", measuring)
    done = sweep(tiny_folder, "--splits", 3, "--no-speed", "--tokens", 10**6, "--prompts", 1000)
    assert done.exit_code == 0, done.output
    assert "of 1000 prompts" in flat(done)
    text = long_text_file.read_bytes()
    assert seen["fit"].numel() + seen["measure"].numel() <= len(text)
    assert seen["fit"].numel() > 0.8 * len(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--splits", "0"), "--splits takes whole numbers from 1 on"),
        (("--splits", "many"), "--splits takes whole numbers from 1 on"),
        (("--splits", "6"), "none from layer 6 on"),
        (("--replays", ""), "--replays takes whole numbers"),
        (("--replays", "96"), "fewer tokens than the prompt's 96"),
        (("--replays", "7"), "replay must be at least the window's 8"),
        (("--state-projector", "both"), "this model has none from layer 2 on"),
        (("--state-projector", "maybe"), "state-projector"),
        (("--method", "pool"), "method"),
        (("--plot", "picture.bmp"), ".png"),
        (("--data", "no-such-text.txt"), "no-such-text.txt"),
        (("--prompt", "100000"), "held-out part of"),
        (("--tokens", "20"), "unknowns"),
    ],
)
def test_bad_values_are_explained(sweep, tiny_folder, options, words):
    done = sweep(tiny_folder, "--no-speed", *options)
    assert done.exit_code == 2
    assert words in flat(done)
    assert "Traceback" not in done.output


def test_a_split_below_a_sliding_layer_is_refused(sweep, sliding_folder):
    done = sweep(sliding_folder, "--splits", 3)
    assert done.exit_code == 2
    assert "layers [3] attend to a sliding window" in flat(done)
