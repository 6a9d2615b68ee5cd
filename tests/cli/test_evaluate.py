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
