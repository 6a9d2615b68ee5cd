"""`kvfold evaluate`."""

from __future__ import annotations

import json

import pytest

from kvfold.cli.options import parse_lengths


@pytest.fixture
def evaluate(kvfold, tiny_folder, addon_folder, text_file):
    def run(*more, addons=(addon_folder,)):
        chosen = [part for addon in addons for part in ("--addon", addon)]
        return kvfold(
            "evaluate", tiny_folder, *chosen, "--data", text_file, "--windows", 2,
            "--window", 64, "--keep-window", 8, "--lengths", "1k,2000", *more,
        )  # fmt: skip

    return run


def test_tables_json_and_plot_are_made(evaluate, tmp_path):
    done = evaluate(
        "--speed-history", 32, "--json", tmp_path / "e.json", "--plot", tmp_path / "e.svg"
    )
    assert done.exit_code == 0, done.output
    rows = [line for line in done.stdout.splitlines() if "%" in line]
    assert rows[0].split()[:2] == ["no", "compression"]
    assert rows[1].split()[0] == "my-addon"
    data = json.loads((tmp_path / "e.json").read_text())
    assert [result["name"] for result in data["results"]] == ["no compression", "my-addon"]
    assert data["results"][1]["plan"]["window"] == 8
    assert [memory["tokens"] for memory in data["results"][0]["memory"]] == [1024, 2000]
    assert data["results"][1]["speed"]["history"] == 32
    assert (tmp_path / "e.svg").read_text().startswith("<?xml")


def test_bytes_are_shown_part_by_part_at_every_length(evaluate, tmp_path):
    done = evaluate("--no-speed", "--json", tmp_path / "e.json")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    heading = "tokens anchors window slots pending plain total smaller value kept"
    start = lines.index(heading)
    (memory, later) = json.loads((tmp_path / "e.json").read_text())["results"][1]["memory"]
    row = next(line for line in lines[start:] if line.startswith("my-addon 1,024"))
    assert row.endswith(f"{memory['bits_per_value']:.2f} {100 * memory['kept_fraction']:.1f}%")
    assert memory["addon_bytes"] == later["addon_bytes"] > 0
    assert sum(memory["components"].values()) == memory["stored_bytes"]


def test_what_an_addon_folds_is_said_first(evaluate):
    done = evaluate("--no-speed")
    told = (
        "my-addon: csa2 (joint), 1 group of 3 layers, 3 layers left as they are: 512 bytes a token"
    )
    assert told in " ".join(done.stdout.split())


def test_every_line_fits_a_hundred_columns(evaluate):
    done = evaluate("--no-speed")
    assert max(len(line) for line in done.stdout.splitlines()) <= 100


@pytest.mark.parametrize("history", ["folded", "exact"])
def test_history_may_be_folded_or_of_an_exact_prefill(evaluate, history):
    done = evaluate("--no-speed", "--history", history, "--anchors", 2)
    assert done.exit_code == 0, done.output
    assert f"history: {history}" in done.output


def test_one_addon_may_be_given_twice_and_keeps_two_rows(evaluate, addon_folder):
    done = evaluate("--no-speed", addons=(addon_folder, addon_folder))
    assert done.exit_code == 0, done.output
    assert "my-addon (2)" in done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lengths", "many"), "token counts"),
        (("--lengths", ","), "at least one length"),
        (("--plot", "picture.bmp"), ".png"),
        (("--history", "none"), "history"),
        (("--keep-window", "-1"), "keep-window"),
        (("--windows", "0"), "windows"),
        (("--data", "no-such-text.txt"), "no-such-text.txt"),
        (("--window", "100000"), "100000"),
    ],
)
def test_bad_values_are_explained(evaluate, options, words):
    done = evaluate("--no-speed", *options)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output


def test_an_addon_for_another_model_is_refused(kvfold, tiny_model, tiny_folder, addon_folder):
    other = tiny_folder.parent / "other"
    if not other.exists():
        from transformers import AutoTokenizer

        tiny_model("llama", vocab_size=261, seed=7).save_pretrained(other)
        AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(other)
    done = kvfold("evaluate", other, "--addon", addon_folder, "--no-speed")
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert "tiny" in done.output


def test_a_missing_addon_is_named(evaluate, tmp_path):
    done = evaluate(addons=(tmp_path / "nowhere",))
    assert done.exit_code == 2
    assert "nowhere" in done.output


def test_the_addon_option_is_needed(kvfold, tiny_folder):
    done = kvfold("evaluate", tiny_folder)
    assert done.exit_code == 2
    assert "--addon" in done.output


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("4096", (4096,)), ("4k, 32K", (4096, 32768)), ("2,1,2", (1, 2)), ("16_384", (16384,))],
)
def test_lengths_are_counts_or_thousands(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.fixture
def evaluate_skipping(kvfold, tiny_folder, skip_folder, text_file):
    def run(*more):
        return kvfold(
            "evaluate", tiny_folder, "--addon", skip_folder, "--data", text_file, "--windows", 3,
            "--window", 80, "--lengths", "1k,2000", *more,
        )  # fmt: skip

    return run


def flat(done):
    """What a command printed, without the frames and line breaks of the terminal."""
    return " ".join(done.output.replace("│", " ").split())


def test_an_addon_that_skips_is_refused_before_the_model_runs(evaluate_skipping, monkeypatch):
    def unexpected(*_, **__):
        raise AssertionError("the model ran")

    monkeypatch.setattr("kvfold.evaluation.runner.evaluate", unexpected)
    done = evaluate_skipping()
    assert done.exit_code == 2
    assert "--continuation N" in flat(done)
    assert "--prefill full" in flat(done)
    assert "skipping: most of a prompt skips" in flat(done)


def test_an_addon_that_skips_can_be_measured_without_skipping(evaluate_skipping, tmp_path):
    done = evaluate_skipping("--prefill", "full", "--no-speed", "--json", tmp_path / "e.json")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "e.json").read_text())["results"][1]
    assert result["plan"]["prefill"] == "full"
    assert result["quality"]["kl"] > 0


def test_a_continuation_is_scored_after_a_skipped_prompt(evaluate_skipping, tmp_path):
    files = ("--json", tmp_path / "e.json", "--plot", tmp_path / "e.svg")
    done = evaluate_skipping("--continuation", 16, *files)
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "e.json").read_text())
    assert (data["windows"], data["prompt"], data["continuation"]) == (3, 64, 16)
    plain, skipping = data["results"]
    assert plain["name"] == "no compression"
    assert skipping["plan"]["prefill"] == "skip"
    assert skipping["skipped_tokens"] == 64 - 16 - 4
    assert skipping["operations_left"] == pytest.approx(0.5 + 0.5 * 16 / 64)
    assert len(skipping["losses"]) == 3
    assert skipping["times_faster"] == pytest.approx(
        plain["prefill_seconds"] / skipping["prefill_seconds"]
    )
    assert [memory["tokens"] for memory in skipping["memory"]] == [1024, 2000]
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    row = next(line for line in rows if line.startswith("skipping "))
    rise, error = (100 * skipping[f"perplexity_rise{end}"] for end in ("", "_error"))
    shown = f"{skipping['perplexity']:.2f} {rise:+.2f} ± {error:.2f}% 62%"
    assert row.startswith(f"skipping {shown}")
    assert "prompts skip layers 3-5 but for the last 16 tokens" in flat(done)
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert (tmp_path / "e.svg").read_text().startswith("<?xml")


def test_speed_and_skipping_can_be_left_out_of_a_continuation(evaluate_skipping, tmp_path):
    more = ("--continuation", 16, "--prefill", "full", "--no-speed", "--json", tmp_path / "e.json")
    done = evaluate_skipping(*more)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "e.json").read_text())["results"][1]
    assert (result["operations_left"], result["skipped_tokens"], result["speed"]) == (1.0, 0, None)
    assert "seconds" not in done.output


def test_prompts_too_short_to_skip_anything_are_told_of(evaluate_skipping):
    done = evaluate_skipping("--continuation", 16, "--replay", 60, "--no-speed")
    assert done.exit_code == 0, done.output
    assert "nothing was skipped in prompts of 64 tokens" in flat(done)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--continuation", "0"), "continuation"),
        (("--continuation", "80"), "--window 80"),
        (("--continuation", "8", "--history", "exact"), "--history exact"),
        (("--continuation", "8", "--speed-history", "32"), "--speed-history"),
        (("--continuation", "8", "--replay", "7"), "replay must be at least the window's 8"),
        (("--continuation", "8", "--plot", "picture.bmp"), ".png"),
    ],
)
def test_bad_values_with_a_continuation_are_explained(evaluate_skipping, options, words):
    done = evaluate_skipping("--no-speed", *options)
    assert done.exit_code == 2
    assert words in flat(done)
    assert "Traceback" not in done.output


def test_an_addon_that_cant_skip_is_refused(evaluate):
    done = evaluate("--no-speed", "--prefill", "skip", "--continuation", 8)
    assert done.exit_code == 2
    assert "prefill: skip needs a depth entry" in flat(done)
