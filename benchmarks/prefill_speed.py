"""Seconds and memory of one prompt when half of its layers are skipped.

`qwen35-4b`: eight layers of Qwen3.5-4B's sizes (hidden 2,560; three Gated DeltaNet layers to one
of gated attention), a vocabulary of 1,024, random weights, split in the middle. `smollm2-135m`:
the whole model. Timed in turns in one run, medians kept: the plain model; the upper attention
layers' history from an untrained CED with nothing skipped, which tells what folding and running in
chunks do alone; and the same with skipping. Weights do not matter to the time.

    python benchmarks/prefill_speed.py

Leaves `prefill_speed.json` in `results/prefill`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from kvfold import models
from kvfold.anatomy import anatomy
from kvfold.budget import operations_left
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.environment import environment
from kvfold.evaluation.report import write_json
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.speed import SpeedSettings, measure_speed
from kvfold.plan import Plan
from kvfold.store.addon import AddOn

FOLDED, SKIP = "folded, nothing skipped", "skip"
QWEN35_4B: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
WEIGHT_SCALE = 0.02


def qwen_layers(layers: int) -> Any:
    """So many layers of Qwen3.5-4B, with random weights, in float32."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**QWEN35_4B, num_hidden_layers=layers))
    return model.eval().requires_grad_(False)


def skipping(model: Any, replay: int) -> AddOn:
    """Untrained CED of every attention layer of the upper half, under `prefill: skip`."""
    shape = anatomy(model)
    split = shape.num_layers // 2
    layers = [layer for layer in shape.foldable_layers if layer >= split]
    entry = {"method": "ced", "split": split, "layers": layers}
    plan = Plan.from_dict({"depth": [entry], "prefill": "skip", "replay": replay})
    addon = AddOn.untrained(model, plan)
    with torch.no_grad():
        for parameter in addon.pipelines.parameters():
            parameter.normal_(std=WEIGHT_SCALE)
    return addon


def measured(model: Any, tokens: int, replay: int, repeats: int) -> dict[str, Any]:
    """Seconds and peak memory of a prompt (and one step after it): plain, folded and skipped."""
    shape = anatomy(model)
    ids = torch.randint(shape.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    settings = SpeedSettings(history=tokens, decode_tokens=1, repeats=repeats)
    skip = skipping(model, replay)
    addons = {PLAIN: None, FOLDED: with_plan(skip, prefill="full"), SKIP: skip}
    speeds = measure_speed(model, addons, ids, settings)
    seconds = {name: tokens / speed.prefill_tokens_per_second for name, speed in speeds.items()}
    return {
        "layers": shape.num_layers,
        "operations_left": operations_left(skip.plan, shape, tokens),
        "seconds": seconds,
        "seconds_left": {name: seconds[SKIP] / seconds[name] for name in (PLAIN, FOLDED)},
        "times_faster": {name: seconds[name] / seconds[SKIP] for name in (PLAIN, FOLDED)},
        "peak_bytes": {name: speed.peak_bytes for name, speed in speeds.items()},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/prefill"))
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--replay", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="of Qwen3.5-4B's sizes")
    chosen = parser.parse_args()
    settings = {name: getattr(chosen, name) for name in ("tokens", "replay", "repeats")}
    report: dict[str, Any] = {**environment(), "settings": settings}
    makers = {
        f"qwen35-4b, {chosen.layers} layers": lambda: qwen_layers(chosen.layers),
        models.DEFAULT_MODEL: lambda: models.load(dtype=torch.float32)[0],
    }
    for name, make in makers.items():
        report[name] = measured(make(), **settings)
        print(f"{name}: {json.dumps(report[name])}", flush=True)
        write_json(chosen.out / "prefill_speed.json", report)


if __name__ == "__main__":
    main()
