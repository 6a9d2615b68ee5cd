"""Folding in a vLLM engine against kvfold's own runtime."""

from __future__ import annotations

import pytest

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

CLOSE = 1e-3
"""Of log-probabilities in float32. Sums run in another order, which is 1e-5; a value on the border
between two levels of its quantisation may then be rounded to the other, which is 2e-4.
"""

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
def test_greedy_tokens_equal_the_runtime_on_every_axis(
    family, eager, tiny_folder, random_addon, prompts, engine, generate, folded_reference
):
    """Also where vLLM compiles what it may (`enforce_eager=False`)."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    # vLLM's Qwen2 divides the hidden size by the heads, whatever head_dim says
    model, folder = tiny_folder(family, **(heads if family == "qwen2" else {}))
    plan = Plan.from_dict(ALL_AXES)
    addon, saved = random_addon(model, plan)
    given = prompts(LENGTHS)
    expected = folded_reference(model, addon, plan, given)
    made = generate(engine(folder, model.config, saved, enforce_eager=eager), given)
    assert made.tokens == expected.tokens
    assert made.gap(expected) < CLOSE


@pytest.mark.parametrize("anchors", [0, 4])
def test_without_a_window_prompts_leave_each_others_rows_alone(
    anchors,
    tiny_folder,
    random_addon,
    prompts,
    engine,
    generate,
    folded_reference,
    decoder_of,
):
    """As `smollm2-csa2` is made; vLLM frees the next token's block of a window of 0."""
    model, folder = tiny_folder("llama")
    depth = [{"method": "csa2", "source": 4, "readers": [5, 6, 7]}]
    plan = Plan.from_dict({"anchors": anchors, "window": 0, "depth": depth})
    addon, saved = random_addon(model, plan)
    given = prompts((300, 129, 64, 33, 16, 15, 2))
    expected = folded_reference(model, addon, plan, given, 20)
    started = engine(folder, model.config, saved, max_num_batched_tokens=96)
    windows = [owner.layout.window for owner in decoder_of(started).kvfold.owners.values()]
    assert all(window is None or window > 0 for window in windows)
    made = generate(started, given, 20)
    assert made.tokens == expected.tokens
    assert made.gap(expected) < CLOSE


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tensor_parallel_changes_no_token(
    family, tiny_folder, random_addon, prompts, engine, generate, folded_reference
):
    model, folder = tiny_folder(family)
    plan = Plan.from_dict(ALL_AXES)
    addon, saved = random_addon(model, plan)
    given = prompts((100, 33))
    expected = folded_reference(model, addon, plan, given, 6)
    made = generate(engine(folder, model.config, saved, tensor_parallel_size=2), given, 6)
    assert made.tokens == expected.tokens
    assert made.gap(expected) < CLOSE
