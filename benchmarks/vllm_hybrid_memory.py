"""Blocks that one request really holds in vLLM's pool, of a hybrid with Qwen3.5-4B's cache.

The model is random and narrow where its cache does not depend on it: 32 layers, 8 of which attend,
the others with states of 2 MiB. See `vllm_memory.py`.

    $KVFOLD_VLLM_ENV/bin/python benchmarks/vllm_hybrid_memory.py

Leaves `hybrid-memory.json` in `results/vllm`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

import vllm_memory

HYBRID = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": vllm_memory.CONTEXT,
}
ATTENDING = list(range(3, 32, 4))
GROUPS = [ATTENDING[:4], ATTENDING[4:]]
READERS = [{"method": "csa2", "source": group[0], "readers": group[1:]} for group in GROUPS]
LATENT = [{"method": "latent", "layers": group, "rank": 1024} for group in GROUPS]
POOL = [{"method": "pool", "layers": ATTENDING}]
K8V4 = [{"method": "turboquant", "layers": ATTENDING}]
PLANS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "csa2": {"depth": READERS},
    "csa2 + pool": {"depth": READERS, "sequence": POOL},
    "csa2 + pool + k8v4": {"depth": READERS, "sequence": POOL, "bits": K8V4},
    "latent": {"depth": LATENT},
    "latent + 8 bits": {"depth": LATENT, "bits": K8V4},
}


def main() -> None:
    """Measure every plan."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**HYBRID)).to(torch.bfloat16)
        model.save_pretrained(folder)
        out = Path("results/vllm/hybrid-memory.json")
        vllm_memory.measure_all(folder, model, PLANS, "bfloat16", out)


if __name__ == "__main__":
    main()
