"""Blocks that one request really holds in vLLM's pool, plain and under several plans.

Needs the environment of `make test-vllm`. Prints a row for each plan; weights of the add-ons are
zero, since what is held does not depend on them.

    $KVFOLD_VLLM_ENV/bin/python benchmarks/vllm_memory.py [MODEL]

Leaves `memory.json` in `results/vllm`.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler's pool is looked into
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402 (vLLM reads its variables when it is imported)

from kvfold import AddOn, models  # noqa: E402
from kvfold.evaluation.environment import environment  # noqa: E402
from kvfold.evaluation.report import write_json  # noqa: E402
from kvfold.plan import Plan  # noqa: E402
from kvfold.vllm.plugin import vllm_version  # noqa: E402

PROMPT, GENERATED, CHUNK, CONTEXT = 1900, 3, 256, 8192
GROUP, RANK = 5, 288


class Held(NamedTuple):
    """blocks: of the pool. block_bytes: of each. most, decoding: held by the request, in bytes."""

    blocks: int
    block_bytes: int
    most: int
    decoding: int
    capacity: int | None


def plans(layers: int) -> dict[str, dict[str, Any] | None]:
    """What is measured, by name; None is the plain model."""
    every = list(range(layers))
    groups = [every[start : start + GROUP] for start in range(0, layers, GROUP)]
    readers = [{"method": "csa2", "source": g[0], "readers": g[1:]} for g in groups]
    latent = [{"method": "latent", "layers": group, "rank": RANK} for group in groups]
    pool = [{"method": "pool", "layers": every}]
    k8v4 = [{"method": "turboquant", "layers": every}]
    return {
        "plain": None,
        "csa2": {"depth": readers},
        "csa2 + pool": {"depth": readers, "sequence": pool},
        "csa2 + pool + k8v4": {"depth": readers, "sequence": pool, "bits": k8v4},
        "latent": {"depth": latent},
        "latent + 8 bits": {"depth": latent, "bits": k8v4},
    }


def held(engine: Any, vocabulary: int) -> Held:
    """What one request of random tokens holds while it runs."""
    from vllm import SamplingParams

    inner = engine.llm_engine
    pool = inner.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    worker = inner.model_executor.driver_worker
    config = getattr(worker, "worker", worker).model_runner.kv_cache_config
    block_bytes = max(t.size for t in config.kv_cache_tensors) // config.num_blocks
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, vocabulary, (PROMPT,), generator=generator).tolist()
    sampling = SamplingParams(
        max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False
    )
    free = pool.get_num_free_blocks()
    inner.add_request("request", {"prompt_token_ids": prompt}, sampling)
    most = last = 0
    while inner.has_unfinished_requests():
        inner.step()
        now = free - pool.get_num_free_blocks()
        most, last = max(most, now), now or last
    capacity = inner.vllm_config.cache_config.kv_cache_size_tokens
    return Held(config.num_blocks, block_bytes, most * block_bytes, last * block_bytes, capacity)


def measure(folder: str, model: Any, plan: dict[str, Any] | None, dtype: str = "float32") -> Held:
    """Start an engine for a plan and run one request."""
    from vllm import LLM

    from kvfold.vllm.settings import Settings

    with tempfile.TemporaryDirectory() as addon:
        overrides = {}
        if plan is not None:
            AddOn.untrained(model, Plan.from_dict(plan)).save_pretrained(addon)
            overrides = Settings(addon).overrides(model.config)
        engine = LLM(
            folder,
            hf_overrides=overrides,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=CONTEXT,
            max_num_seqs=4,
            max_num_batched_tokens=CHUNK,
        )
        found = held(engine, model.config.vocab_size)
        engine.llm_engine.engine_core.shutdown()
    gc.collect()
    return found


def show(name: str, row: Held, plain_most: int) -> None:
    """Print one plan's line."""
    print(
        f"{name}: {row.blocks} x {row.block_bytes:,} bytes; {row.decoding / 2**20:.1f} MiB "
        f"while decoding, {row.most / 2**20:.1f} at most, {plain_most / row.most:.1f} times fewer; "
        f"{row.capacity:,} tokens",
        flush=True,
    )


def measure_all(
    folder: str, model: Any, chosen: dict[str, dict[str, Any] | None], dtype: str, out: Path
) -> None:
    """A row for each plan, "plain" the first, shown and written."""
    rows: dict[str, Held] = {}
    for name, plan in chosen.items():
        rows[name] = measure(folder, model, plan, dtype)
        show(name, rows[name], rows["plain"].most)
    settings = {"prompt": PROMPT, "chunk": CHUNK, "context": CONTEXT, "dtype": dtype}
    made = {name: row._asdict() for name, row in rows.items()}
    write_json(out, {**environment(), "vllm": vllm_version(), "settings": settings, "plans": made})


def main() -> None:
    """Measure every plan on the model that was named, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=models.DEFAULT_MODEL, help="as in `kvfold`")
    parser.add_argument("--out", type=Path, default=Path("results/vllm"))
    chosen = parser.parse_args()
    model, _ = models.load(chosen.model, dtype=torch.float32)
    folder = models.model_folder(chosen.model)
    measure_all(
        folder, model, plans(model.config.num_hidden_layers), "float32", chosen.out / "memory.json"
    )


if __name__ == "__main__":
    main()
