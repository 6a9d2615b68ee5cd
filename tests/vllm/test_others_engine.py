"""Models without an add-on run as they do without the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

LAYERS = {"llama": {}, "phi3": {"num_key_value_heads": 4}}
"""One of a family that the plugin has models for, and one of another."""
COUNT = 6


def test_other_models_and_plain_ones_give_the_same_with_and_without_the_plugin(
    tiny_folder, prompts, engine, generate, tmp_path
):
    made = {family: tiny_folder(family, **keys) for family, keys in LAYERS.items()}
    given = prompts((60, 9))
    asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
    folders = {family: str(folder) for family, (_, folder) in made.items()}
    asked.write_text(json.dumps({"folders": folders, "prompts": given, "count": COUNT}))
    script = Path(__file__).with_name("without_plugin.py")
    done = subprocess.run(
        [sys.executable, script, asked, answered],
        env={**os.environ, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    without = json.loads(answered.read_text())
    assert without["registered"] == {"without": False, "untested": False, "tested": True}
    for family, (model, folder) in made.items():
        found = generate(engine(folder, model.config, None), given, COUNT)
        assert found.tokens == without["tokens"][family]
        assert found.logprobs == without["logprobs"][family]
        for prompt, tokens in zip(given, found.tokens, strict=True):
            with torch.no_grad():
                output = model.generate(
                    torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None
                )
            assert output[0, len(prompt) :].tolist() == tokens
