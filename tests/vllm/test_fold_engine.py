"""Folding in a vLLM engine against kvfold's own runtime."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

ALL_AXES = {
    "anchors": 4,
    "window": 32,
    "depth": [
        {"method": "csa2", "source": 1, "readers": [2]},
        {"method": "ced", "split": 3, "layers": [3]},
        {"method": "latent", "layers": [4, 5], "rank": 48},
    ],
    "sequence": [
        {"method": "pool", "layers": [4, 5], "group": 4, "gate": "head", "overlap": True},
        {"method": "pool", "layers": [6], "group": 4, "gate": "token"},
    ],
    "bits": [{"method": "turboquant", "layers": [6, 7], "key_bits": 8, "value_bits": 4}],
}
"""Layer 0 stays as it is; the others are served by every axis, alone and together."""
LENGTHS = (300, 150, 33, 7)


@pytest.mark.parametrize(
    ("family", "eager"),
    [("llama", True), ("qwen3", False), ("qwen3_moe", True), ("qwen2", True), ("mistral", True)],
)
def test_greedy_tokens_equal_the_runtime_on_every_axis(family, eager, check_folded):
    """Also where vLLM compiles what it may (`enforce_eager=False`)."""
    # vLLM's Qwen2 divides the hidden size by the heads, whatever head_dim says
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1} if family == "qwen2" else None
    check_folded(family, ALL_AXES, LENGTHS, shape=heads, enforce_eager=eager)


@pytest.mark.parametrize("anchors", [0, 4])
def test_without_a_window_prompts_leave_each_others_rows_alone(anchors, check_folded, decoder_of):
    """As `smollm2-csa2` is made; vLLM frees the next token's block of a window of 0."""
    depth = [{"method": "csa2", "source": 4, "readers": [5, 6, 7]}]
    plan = {"anchors": anchors, "window": 0, "depth": depth}
    lengths = (300, 129, 64, 33, 16, 15, 2)
    started = check_folded("llama", plan, lengths, count=20, max_num_batched_tokens=96)
    windows = [owner.layout.window for owner in decoder_of(started).kvfold.owners.values()]
    assert all(window is None or window > 0 for window in windows)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tensor_parallel_changes_no_token(family, check_folded):
    check_folded(family, ALL_AXES, (100, 33), count=6, tensor_parallel_size=2)


def test_of_a_checkpoint_in_two_forms_the_one_with_transformers_names_is_read(
    tiny_folder, random_addon, prompts, engine, generate, folded_reference
):
    """Mistral's are. By itself vLLM reads the other one, which has other names and orders heads'
    values otherwise."""
    model, folder = tiny_folder("mistral")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")  # with an index
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    plan = Plan.from_dict({"depth": [{"method": "csa2", "source": 1, "readers": [2]}]})
    addon, saved = random_addon(model, plan)
    given = prompts((200, 9))
    expected = folded_reference(model, addon, plan, given, 4)
    generate(engine(folder, model.config, saved), given, 4).require_close(expected)
