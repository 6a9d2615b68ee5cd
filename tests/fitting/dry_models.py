"""Models of a few million weights, and what a stage of a fit really holds and computes on them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from kvfold.anatomy import anatomy
from kvfold.evaluation.peak import peak_memory
from kvfold.fitting.live_memory import BASE, LiveMemory
from kvfold.fitting.mixture import Mixture, MixturePart
from kvfold.fitting.recipe import Recipe
from kvfold.store.addon import AddOn

VOCABULARY = 8192
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
ROOT = Path(__file__).parents[2]


def sized_config():
    """A dense model of 9 million weights."""
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES)


def recipe_of(stage, seq, **keys):
    """A recipe of one stage; rows of two batches of the closed form, and a little held out."""
    rows = 2 * max(1, 1024 // seq)
    whole = {
        "name": "sized",
        "model": "not-loaded",
        "plan": {"preset": "csa2", "window": 32},
        "text": [{"source": "somewhere", "tokens": rows * seq}],
        "seq": seq,
        "held_out": 2 * seq,
        "stages": [stage],
    }
    return Recipe.from_dict({**whole, **keys})


def prepared(recipe):
    """A real model with a closed-form add-on, and what the recipe's stage is called with."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(sized_config()).eval().requires_grad_(False)
    addon = AddOn.untrained(model, recipe.plan_for(anatomy(model)))
    rows = recipe.text[0].tokens // recipe.seq
    windows = torch.randint(0, VOCABULARY, (rows, recipe.seq))
    mixture = Mixture([MixturePart("text", windows, 1.0)], 0)
    held_out = torch.randint(0, VOCABULARY, (recipe.held_out_tokens // recipe.seq, recipe.seq))
    for parameter in addon.parameters():
        parameter.copy_(0.02 * torch.randn_like(parameter))
    return model, addon, mixture, held_out


def measured(recipe):
    """A `LiveMemory` of the real stage."""
    model, addon, *texts = prepared(recipe)
    (entry,) = recipe.stages
    gc.collect()
    with LiveMemory() as meter:
        meter.hold(BASE, [*model.parameters(), *model.buffers()])
        meter.hold("add-on", addon.parameters())
        entry.kind.run(model, addon, *texts, entry.settings, progress=False)
    return meter


def resident_peak(recipe):
    """How far a process of its own grows while it runs the stage, in bytes; None if not known.

    Freed memory goes back to the system at once there, or what an earlier step left would hide a
    later one's.
    """
    variables = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.fitting.dry_models", recipe.to_json()]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """The child process."""
    recipe = Recipe.from_json(sys.argv[1])
    torch.set_num_threads(1)
    warm = prepared(recipe)
    (entry,) = recipe.stages
    model, addon, mixture, held_out = warm
    entry.kind.run(model, addon, mixture, held_out, entry.settings, progress=False)
    with peak_memory(model.device) as peak:
        entry.kind.run(model, addon, mixture, held_out, entry.settings, progress=False)
    sys.stdout.write(f"{json.dumps(peak.above_start)}\n")


if __name__ == "__main__":
    main()
