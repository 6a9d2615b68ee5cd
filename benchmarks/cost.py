"""What folding costs: speed of decode and prefill, speed and memory of fitting.

All ratios come from one run, plain and folded interleaved, medians of the repeats.

    python benchmarks/cost.py --data DATA      # DATA/wikitext-2/valid.txt

Leaves `cost.json` in `results/cost`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from kvfold.anatomy import anatomy
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.environment import environment
from kvfold.evaluation.peak import peak_memory
from kvfold.evaluation.report import write_json
from kvfold.evaluation.speed import SpeedSettings, measure_speed
from kvfold.fitting.corpus import load_text, token_windows
from kvfold.fitting.fit import fit
from kvfold.models import DEFAULT_MODEL, load
from kvfold.plan import Plan
from kvfold.presets import preset
from kvfold.runtime.logits import plain_hidden_states

DECODED = ("balanced", "latent", "csa2", "ced")
FITTED_RANKS = (576, 1152)
WINDOW = 512
REPEATS = 2


def fit_cost(model: Any, plan: Plan, tokens: torch.Tensor) -> dict[str, Any]:
    """Tokens a second of the pass against the plain forward's, and memory above the model's.

    The plain forward runs the decoder on the same batches before and after each fit.
    """
    ratios, peaks, solving = [], [], []
    for _ in range(REPEATS):
        before = _plain_rate(model, tokens)
        with peak_memory(model.device) as peak:
            addon = fit(model, plan, tokens, progress=False)
        if peak.above_start is not None:
            peaks.append(peak.above_start / 2**20)
        after = _plain_rate(model, tokens)
        ratios.append(addon.report["fit"]["tokens_per_second"] / ((before + after) / 2))
        solving.append(addon.report["fit"]["solve_seconds"])
    return {
        "pass_over_plain_forward": statistics.median(ratios),
        "all_ratios": ratios,
        "peak_megabytes_above_model": max(peaks, default=None),
        "solve_seconds": statistics.median(solving),
        "tokens": tokens.numel(),
    }


def _plain_rate(model: Any, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    for ids in torch.split(tokens, 2):
        plain_hidden_states(model, ids)
    return tokens.numel() / (time.perf_counter() - start)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext-2/ in it")
    parser.add_argument("--out", type=Path, default=Path("results/cost"))
    parser.add_argument("--history", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each fit")
    chosen = parser.parse_args()
    model, tokenizer = load(DEFAULT_MODEL, dtype=torch.float32)
    shape = anatomy(model)
    text = load_text(chosen.data / "wikitext-2" / "valid.txt", part="all")
    tokens = token_windows(text, tokenizer, window=WINDOW, tokens=chosen.tokens)
    upper = list(range(shape.num_layers // 2, shape.num_layers))
    plans = {
        f"latent rank {rank}": Plan.from_dict(
            {"depth": [{"method": "latent", "layers": upper, "rank": rank}]}
        )
        for rank in FITTED_RANKS
    }
    plans |= {name: preset(name, shape) for name in ("csa2", "balanced")}
    fits = {name: fit_cost(model, plan, tokens) for name, plan in plans.items()}
    addons: dict[str, Any] = {}
    for name in DECODED:
        addon = fit(model, preset(name, shape), tokens, progress=False)
        addons[f"{name} expanded"] = with_plan(addon, resident="expanded")
        if name == DECODED[0]:
            addons[f"{name} shared"] = with_plan(addon, resident="shared")
    settings = SpeedSettings(history=chosen.history, decode_tokens=24, repeats=4)
    speeds = measure_speed(model, {"no compression": None, **addons}, tokens, settings)
    report = {
        **environment(),
        "fits": fits,
        "speeds": {name: vars(speed) for name, speed in speeds.items()},
        "history": chosen.history,
    }
    write_json(chosen.out / "cost.json", report)
    print(json.dumps({"fits": fits, "speeds": report["speeds"]}))


if __name__ == "__main__":
    main()
