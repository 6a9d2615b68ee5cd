"""Dry runs against real ones: peak memory and time of stages, predicted and measured.

Each stage runs in a process of its own, for a few steps, on random tokens: what it takes does not
depend on them. Time is only worth reading on a machine that does nothing else.

    python benchmarks/predict_table.py

Leaves `predict.json` in `results/predict`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvfold.anatomy import anatomy
from kvfold.evaluation.environment import environment
from kvfold.evaluation.peak import peak_memory
from kvfold.evaluation.report import write_json
from kvfold.fitting.components_of_memory import ADDON
from kvfold.fitting.live_memory import BASE
from kvfold.fitting.machine import measured_machine
from kvfold.fitting.mixture import Mixture, MixturePart
from kvfold.fitting.predict import predict
from kvfold.fitting.recipe import Recipe, StageEntry
from kvfold.models import load, load_config
from kvfold.store.addon import AddOn

MODELS = ("smollm2-135m", "tiny-hybrid")
STAGES: dict[str, dict[str, Any]] = {
    "closed-form": {"stage": "closed-form"},
    "distil": {"stage": "distil", "steps": 3, "rows": 2},
    "distil, checkpointed": {
        "stage": "distil",
        "steps": 3,
        "rows": 2,
        "checkpoint_layers": True,
    },
    "refine": {"stage": "refine", "steps": 16, "look_every": 16},
}
ROW_LENGTHS = (512, 1024)
HELD_OUT_ROWS = 2
TOKENS = 8192
SHORT = 512
"""Tokens of a row of the short run before."""


def recipe_of(model: str, stage: dict[str, Any], seq: int) -> Recipe:
    """A recipe of one stage."""
    return Recipe.from_dict(
        {
            "name": "measured",
            "model": model,
            "dtype": "float32",
            "plan": {"preset": "csa2" if model == MODELS[0] else "ced-csa2", "window": 32},
            "text": [{"source": "random", "tokens": TOKENS}],
            "seq": seq,
            "held_out": HELD_OUT_ROWS * seq,
            "stages": [stage],
        }
    )


def measure(recipe: Recipe) -> dict[str, float | None]:
    """Peak memory above the model's and seconds of the real stage, in this process.

    A short run of the same stage goes before, since what a process takes to start with (modules,
    threads, libraries' own memory) is no part of a stage.
    """
    torch.manual_seed(0)
    model, _ = load(recipe.model_name, dtype=torch.float32)
    for weight in model.parameters():  # a file that is mapped would come in while it is measured
        weight.data = weight.data.clone()
    (entry,) = recipe.stages
    short = {"steps": 1, "look_every": 1} if hasattr(entry.settings, "steps") else {}
    run(model, recipe, replace(entry, settings=replace(entry.settings, **short)), SHORT, 2 * SHORT)
    with peak_memory(model.device) as peak:
        seconds = run(model, recipe, entry, recipe.seq, TOKENS)
    return {"bytes_above_model": peak.above_start, "seconds": seconds}


def run(model: Any, recipe: Recipe, entry: StageEntry, seq: int, tokens: int) -> float:
    """Seconds of a stage on random tokens, with an add-on of its own."""
    shape = anatomy(model)
    addon = AddOn.untrained(model, recipe.plan_for(shape))
    for parameter in addon.parameters():
        parameter.copy_(0.02 * torch.randn_like(parameter))
    windows = torch.randint(0, shape.vocab_size, (tokens // seq, seq))
    mixture = Mixture([MixturePart("random", windows, 1.0)], 0)
    started = time.perf_counter()
    entry.kind.run(model, addon, mixture, windows[:HELD_OUT_ROWS], entry.settings, progress=False)
    return time.perf_counter() - started


FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Memory that is freed goes back to the system at once: the peak is that of live memory. New pages
for every tensor take time, so seconds are measured without it."""


def in_own_process(recipe: Recipe, variables: dict[str, str]) -> dict[str, Any]:
    """`measure` under these environment variables."""
    command = [sys.executable, __file__, "--measure", recipe.to_json()]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def compare(name: str, recipe: Recipe) -> dict[str, Any]:
    """One line of the table."""
    told = predict(recipe, load_config(recipe.model_name), "cpu", torch.float32)
    (stage,) = told.stages
    machine = measured_machine(torch.device("cpu"), [stage.work])
    before = stage.components[BASE] + stage.components.get(ADDON, 0)
    return {
        "model": recipe.model,
        "stage": name,
        "seq": recipe.seq,
        "predicted": {
            "bytes_above_model": stage.peak_bytes - before,
            "seconds": stage.seconds(machine),
        },
        "measured": {
            "bytes_above_model": in_own_process(recipe, FREED_AT_ONCE)["bytes_above_model"],
            "seconds": in_own_process(recipe, {})["seconds"],
        },
        "prediction": stage.to_dict(machine),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", metavar="RECIPE", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--seq", nargs="+", type=int, default=list(ROW_LENGTHS))
    parser.add_argument("--out", type=Path, default=Path("results/predict"))
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(Recipe.from_json(chosen.measure))))
        return
    lines = []
    for model in chosen.models:
        for name in chosen.stages:
            for seq in chosen.seq:
                line = compare(name, recipe_of(model, STAGES[name], seq))
                lines.append(line)
                print(json.dumps({k: v for k, v in line.items() if k != "prediction"}), flush=True)
    write_json(chosen.out / "predict.json", {**environment(), "lines": lines})


if __name__ == "__main__":
    main()
