"""`kvfold vllm serve`: the command that it makes, and what it refuses before running anything."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from kvfold import AddOn
from kvfold.cli import build_app
from kvfold.plan import Plan

SKIP = {
    "depth": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}],
    "prefill": "skip",
    "window": 16,
    "replay": 32,
}


@pytest.fixture
def run(monkeypatch):
    def go(*arguments):
        return CliRunner().invoke(build_app(), ["vllm", "serve", *map(str, arguments)])

    monkeypatch.setenv("COLUMNS", "1000")
    return go


@pytest.fixture
def saved(tiny_model, tmp_path):
    """A tiny model and an add-on for it: their folders."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    AddOn.untrained(model, Plan.from_dict(SKIP)).save_pretrained(tmp_path / "addon")
    return tmp_path / "model", tmp_path / "addon"


def test_the_command_carries_the_add_on_and_what_else_was_given(run, saved):
    import shlex

    model, addon = saved
    result = run(model, "--addon", addon, "--dry-run", "--replay", 40, "--port", 8123)
    assert result.exit_code == 0, result.output
    command = shlex.split(result.output)
    assert command[:5] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
    ]
    assert command[7:] == [
        "--served-model-name", str(model), "--host", "127.0.0.1", "--config-format", "hf",
        "--port", "8123",
    ]  # fmt: skip
    assert json.loads(command[command.index("--hf-overrides") + 1]) == {
        "architectures": ["KvfoldLlamaForCausalLM"],
        "kvfold": {"addon": str(addon), "plan": {"replay": 40}},
    }


def test_steps_that_fold_are_short_and_what_was_given_is_kept(run, saved):
    model, addon = saved
    folds = ("--addon", addon, "--prefill", "full", "--dry-run")
    assert "--max-num-batched-tokens 512" in run(model, *folds).output
    result = run(model, *folds, "--max_num_batched_tokens=64", "--host", "::1")
    assert "512" not in result.output
    assert result.output.count("--host") == 1
    assert "--host" not in run(model, *folds, "--uds", "socket").output


def test_another_models_add_on_is_refused(run, saved, tiny_model, tmp_path):
    tiny_model("llama", num_hidden_layers=7).save_pretrained(tmp_path / "other")
    result = run(tmp_path / "other", "--addon", saved[1], "--dry-run")
    assert result.exit_code == 2
    assert "its number of layers is 7 and not 6" in result.output


@pytest.mark.parametrize("key", [["--api-key", "s3cret", "other"], ["--api_key=s3cret"]])
def test_keys_of_clients_are_not_printed(run, saved, key):
    model, addon = saved
    result = run(model, "--addon", addon, "--dry-run", *key, "--port", 8123)
    assert result.exit_code == 0, result.output
    assert "s3cret" not in result.output and "other" not in result.output
    assert "--port 8123" in result.output


@pytest.mark.parametrize("more", [["--hf-overrides", "{}"], ["--hf_overrides.rope_theta=2"]])
def test_a_second_set_of_overrides_is_refused(run, saved, more):
    """vLLM would take the last one, and serve the plain model."""
    model, addon = saved
    result = run(model, "--addon", addon, "--dry-run", *more)
    assert result.exit_code != 0
    assert "--hf-overrides is how kvfold tells" in result.output
