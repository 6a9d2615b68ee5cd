"""`kvfold inspect` and the application around it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import kvfold
from kvfold.cli import build_app
from kvfold.cli.inspect import LENGTHS, RESIDENCES, layer_ranges
from kvfold.presets import PRESETS


@pytest.fixture(scope="module")
def app():
    return build_app()


@pytest.fixture
def run(app):
    def call(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


@pytest.fixture
def folder(tiny_config, tmp_path):
    """Folders with a configuration and no weights."""

    def save(family):
        path = tmp_path / family
        tiny_config(family).save_pretrained(path)
        return path

    return save


def test_every_family_is_shown_from_its_configuration_alone(run, folder, family, tiny_config):
    result = run("inspect", folder(family))
    assert result.exit_code == 0, result.output
    assert f" {kvfold.anatomy(tiny_config(family)).family.name} " in result.output
    assert "no compression" in result.output
    assert "balanced" in result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_json_holds_layers_bytes_and_every_preset(run, folder, tiny_config):
    result = run("inspect", folder("llama"), "--json")
    report = json.loads(result.output)
    described = kvfold.anatomy(tiny_config("llama"))
    assert len(report["layers"]) == 6
    assert report["bytes_per_token"] == described.bytes_per_token() == 6 * 2 * 32 * 2
    assert set(report["plans"]) == set(PRESETS)
    tokens = str(LENGTHS[1])
    assert report["plain_bytes"][tokens] == LENGTHS[1] * report["bytes_per_token"]
    for resident in RESIDENCES:
        saving = report["plans"]["balanced"][resident]
        times = report["plain_bytes"][tokens] / saving["bytes"][tokens]
        assert saving["times_smaller"][tokens] == pytest.approx(times, abs=1e-3)
    assert report["plans"]["balanced"]["shared"]["times_smaller"][tokens] > 3


def test_hybrids_show_their_recurrent_state_and_count_it(run, folder, tiny_config):
    assert "Recurrent state" in run("inspect", folder("qwen3_5")).output
    report = json.loads(run("inspect", folder("qwen3_5"), "--json").output)
    described = kvfold.anatomy(tiny_config("qwen3_5"))
    assert report["recurrent_bytes"] == described.recurrent_bytes()
    plain = described.bytes_per_token() * LENGTHS[0] + described.recurrent_bytes()
    assert report["plain_bytes"][str(LENGTHS[0])] == plain


def test_a_preset_that_does_not_fit_says_so_in_its_row(run, folder):
    path = folder("qwen3_5")
    assert "does not fit this model" in run("inspect", path).output
    report = json.loads(run("inspect", path, "--json").output)
    assert "at least 2" in report["plans"]["csa2"]["unavailable"]


def test_a_plan_of_ones_own_is_one_more_row(run, folder, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("depth: [{method: latent, layers: [0, 1], rank: 8}]", encoding="utf-8")
    result = run("inspect", folder("llama"), "--plan", plan, "--json")
    assert json.loads(result.output)["plans"]["your plan"]["plan"]["depth"][0]["rank"] == 8
    assert "your plan" in run("inspect", folder("llama"), "--plan", plan).output


@pytest.mark.parametrize("budget", [("--times-smaller", 8), ("--bytes-per-token", 96)])
def test_a_budget_is_one_more_row_with_what_it_picked(run, folder, budget):
    shown = run("inspect", folder("llama"), *budget)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("your budget") == 2  # its row, and what it is in words
    assert max(map(len, shown.output.splitlines())) <= 100
    report = json.loads(run("inspect", folder("llama"), *budget, "--json").output)
    made = report["plans"]["your budget"]
    assert made["description"].endswith("codes in 5 bits: 92 bytes a token, 8.3x smaller")
    assert made["description"] in " ".join(shown.output.split())
    assert made["plan"] == report["plans"]["8x"]["plan"]


def test_a_plan_and_a_budget_are_two_rows(run, folder, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("bits: [{method: turboquant, layers: [0, 1]}]", encoding="utf-8")
    result = run("inspect", folder("llama"), "--plan", plan, "--times-smaller", 3, "--json")
    plans = json.loads(result.output)["plans"]
    assert list(plans)[-2:] == ["your plan", "your budget"]
    assert plans["your plan"]["description"].startswith("keys in 8 bits, values in 4 in 2 of 6")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--times-smaller", 4, "--bytes-per-token", 9), "only one of"),
        (("--times-smaller", 100), "up to 64 times smaller"),
        (("--times-smaller", -1), "above 0"),
        (("--bytes-per-token", 1000), "below the plain cache's 768 bytes"),
    ],
)
def test_a_budget_that_can_not_be_is_explained(run, folder, options, message):
    result = run("inspect", folder("llama"), *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def hybrid_folder(tiny_folder, tiny_model, tmp_path_factory):
    """A folder with a tiny hybrid and a tokenizer of bytes."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("models") / "hybrid"
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tiny_model("qwen3_5", vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_decay_adds_a_table_of_half_lives_and_heads_that_keep_a_state(
    run, hybrid_folder, text_file
):
    options = ("--decay", "--data", text_file, "--windows", 3, "--window", 300)
    shown = run("inspect", hybrid_folder, *options)
    assert shown.exit_code == 0, shown.output
    assert "forget, on 3 windows of 300 tokens" in shown.stdout
    assert "after 128" in shown.stdout
    assert "after 256" in shown.stdout
    assert "after 512" not in shown.stdout  # longer than the windows
    assert max(map(len, shown.stdout.splitlines())) <= 100
    report = json.loads(run("inspect", hybrid_folder, *options, "--json").stdout)
    layers = report["decay"]["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2, 4, 5, 6]
    for layer in layers:
        assert len(layer["heads"]) == 4
        kept = [head["kept"]["128"] for head in layer["heads"]]
        counts = f"{sum(k > 0.01 for k in kept)} / {sum(k > 0.001 for k in kept)}"
        lives = sorted(head["half_life"] for head in layer["heads"])
        row = next(
            line
            for line in shown.stdout.splitlines()
            if line.startswith(f"│     {layer['layer']} │     4 │")
        )
        assert counts in row
        assert f" {lives[0]:.1f} " in row


def test_decay_of_a_model_that_only_attends_is_an_error_before_its_weights_are_loaded(run, folder):
    result = run("inspect", folder("llama"), "--decay")
    assert result.exit_code == 2
    assert "has no linear-attention layers" in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", [("--data", "x.txt"), ("--window", 64), ("--device", "cpu")])
def test_options_of_decay_want_decay(run, folder, option):
    result = run("inspect", folder("qwen3_5"), *option)
    assert result.exit_code == 2
    assert f"got {option[0]} without it" in " ".join(result.stderr.replace("│", " ").split())


def test_help_says_that_decay_loads_weights(run):
    shown = " ".join(run("inspect", "--help").output.replace("│", " ").split())
    assert "Load the weights and measure how fast states forget" in shown


def test_every_preset_is_told_in_words(run, folder):
    shown = run("inspect", folder("qwen3_5")).output
    assert "4 tokens a slot (token gate): 64 bytes a token, 4.0x smaller" in shown
    report = json.loads(run("inspect", folder("qwen3_5"), "--json").output)
    for saving in report["plans"].values():
        assert saving.get("description") or saving["unavailable"]


def test_a_plan_that_is_held_alike_in_both_ways_has_one_row(run, folder):
    rows = run("inspect", folder("llama")).output.splitlines()
    assert any("k8v4" in row and "auto, shared" in row for row in rows)
    assert any("csa2" in row and " auto  " in row for row in rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depth: [{method: latent, layers: [0, 9], rank: 8}]", "layers 0 to 5"),
        ("windw: 3", "unknown key windw"),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error_in_one_message(run, folder, tmp_path, text, message):
    plan = tmp_path / "plan.yaml"
    plan.write_text(text, encoding="utf-8")
    result = run("inspect", folder("llama"), "--plan", plan)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_errors_are_one_message_with_exit_code_2(run, tmp_path):
    for name, message in (
        ("./nowhere", "there is no folder ./nowhere"),
        (tmp_path, "must hold config.json"),
    ):
        result = run("inspect", name)
        assert result.exit_code == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr
        assert not result.stdout


def test_an_unsupported_model_is_an_error_that_lists_the_supported(run, tmp_path):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert "gpt2" in result.stderr
    assert "Qwen3.5" in result.stderr


def test_the_embedded_model_is_the_default(run, smollm2):
    report = json.loads(run("inspect", "--json").output)
    assert report["num_layers"] == 30
    assert report["bytes_per_token"] == 23_040


def test_the_version_is_shown(run):
    assert run("--version").output.strip() == f"kvfold {kvfold.__version__}"


def test_help_lists_every_command_and_each_has_an_example(run):
    listed = run("--help").output
    for command in ("inspect", "fit", "evaluate", "generate", "demo"):
        assert command in listed
        result = run(command, "--help")
        assert result.exit_code == 0
        assert "Example" in result.output


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (range(15), "0-14"),
        ([3, 7, 11, 15], "3, 7 .. 15"),
        ([0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14], "0-2, 4-6 .. 12-14"),
        ([0, 1, 3], "0-1, 3"),
        ([2], "2"),
        ([], ""),
    ],
)
def test_layer_numbers_are_shortened(indices, expected):
    assert layer_ranges(indices) == expected
