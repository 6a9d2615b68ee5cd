"""Seconds of a prompt on vLLM, plain and skipping upper layers, in turns in one run.

Both engines run at once in processes of their own and only one of them works at a time; medians
are kept. Rows that ran through each layer are counted by the layers themselves. The split and the
replay are of a plan that is named here or of an add-on; an untrained one by default, since its
weights do not matter to the time.

    $KVFOLD_VLLM_ENV/bin/python benchmarks/vllm_speed.py [MODEL] [--addon DIR]

Needs the environment of `make test-vllm`. Leaves `speed.json` in `results/vllm`, and ends with
status 1 if skipping is not as much faster as `--at-least` says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for functions that count inside the engines
}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402 (vLLM reads its variables when it is imported)

from kvfold import AddOn, models  # noqa: E402
from kvfold.evaluation.environment import environment  # noqa: E402
from kvfold.evaluation.report import write_json  # noqa: E402
from kvfold.plan import Plan  # noqa: E402
from kvfold.vllm.plugin import vllm_version  # noqa: E402
from kvfold.vllm.settings import Settings  # noqa: E402
from vllm_rows import count_rows, take_rows  # noqa: E402

PLAIN, SKIP = "plain", "skip"


def engine(folder: str, addon: str | None, config: Any, chosen: argparse.Namespace) -> Any:
    """An engine in a process of its own, warmed up."""
    from vllm import LLM

    made = LLM(
        folder,
        hf_overrides={} if addon is None else Settings(addon).overrides(config),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=chosen.tokens + 64,
        max_num_seqs=4,
        max_num_batched_tokens=chosen.chunk or chosen.tokens + 64,
    )
    prompt_seconds(made, config, chosen.tokens, seed=0)
    made.apply_model(count_rows)
    return made


def prompt_seconds(made: Any, config: Any, tokens: int, seed: int) -> float:
    """Until the first token of an answer."""
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(5, config.vocab_size, (tokens,), generator=draw).tolist()
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    made.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return time.perf_counter() - began


def untrained(folder: str, where: str, chosen: argparse.Namespace) -> str:
    """An add-on of a plan that skips the layers from the split on."""
    model, _ = models.load(folder, dtype=torch.float32)
    layers = list(range(chosen.split, model.config.num_hidden_layers))
    plan = Plan.from_dict(
        {
            "depth": [{"method": "ced", "split": chosen.split, "layers": layers}],
            "prefill": "skip",
            "window": chosen.replay,
            "replay": chosen.replay,
        }
    )
    AddOn.untrained(model, plan).save_pretrained(where)
    return where


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Both engines in turns."""
    folder, config = models.model_folder(chosen.model), models.load_config(chosen.model)
    if chosen.split is None:
        chosen.split = config.num_hidden_layers // 2
    with tempfile.TemporaryDirectory() as made:
        addon = chosen.addon or untrained(folder, made, chosen)
        plan = AddOn.from_pretrained(addon).plan
        engines = {PLAIN: None, SKIP: addon}
        engines = {name: engine(folder, used, config, chosen) for name, used in engines.items()}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(1, chosen.repeats + 1):
            for name, one in engines.items():
                seconds[name].append(prompt_seconds(one, config, chosen.tokens, seed=turn))
        rows = {name: one.apply_model(take_rows)[0] for name, one in engines.items()}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {
        "split": plan.split,
        "replay": plan.replay,
        "anchors": plan.anchors,
        "seconds": seconds,
        "median_seconds": medians,
        "times_faster": medians[PLAIN] / medians[SKIP],
        "rows_per_layer_and_prompt": {
            name: [count // chosen.repeats for count in counts] for name, counts in rows.items()
        },
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=models.DEFAULT_MODEL, help="as in `kvfold`")
    parser.add_argument("--addon", help="whose plan skips; instead of --split and --replay")
    parser.add_argument("--split", type=int, help="first layer that is skipped; half if not")
    parser.add_argument("--replay", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1900, help="of a prompt")
    parser.add_argument("--chunk", type=int, help="tokens of a step; the whole prompt if not")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at-least", type=float, default=1.6, help="times faster")
    parser.add_argument("--out", type=Path, default=Path("results/vllm"))
    chosen = parser.parse_args()
    found = measure(chosen)
    settings = {name: value for name, value in vars(chosen).items() if name != "out"}
    machine = {**environment(), "vllm": vllm_version()}
    write_json(chosen.out / "speed.json", {**machine, "settings": settings, **found})
    for name, taken in found["median_seconds"].items():
        rows = found["rows_per_layer_and_prompt"][name]
        print(f"{name}: {taken:.2f} s; rows of the first and last layer: {rows[0]}, {rows[-1]}")
    print(f"{found['times_faster']:.2f} times faster")
    sys.exit(found["times_faster"] < chosen.at_least)


if __name__ == "__main__":
    main()
