"""Qwen3.5 hybrids in a vLLM engine against kvfold's own runtime, in float32.

vLLM's own kernels are in `test_hybrid_kernels.py`.
"""

from __future__ import annotations

import pytest
import torch

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

CLOSE = 1e-3
"""Of log-probabilities, as in `test_fold_engine.py`."""

ALL_AXES = {
    "anchors": 4,
    "window": 32,
    "depth": [
        {"method": "csa2", "source": 3, "readers": [5]},
        {"method": "latent", "layers": [7, 9], "rank": 48},
    ],
    "sequence": [
        {"method": "pool", "layers": [7, 9], "group": 4, "gate": "head", "overlap": True},
    ],
    "bits": [{"method": "turboquant", "layers": [11], "key_bits": 8, "value_bits": 4}],
}
"""Layer 1 stays as it is. The latent code comes late, so longer steps run in parts."""


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": False}], ids=["eager", "compiled"])
def test_greedy_tokens_equal_the_runtime_on_every_axis(
    settings,
    plain_delta,
    tiny_folder,
    random_addon,
    prompts,
    engine,
    generate,
    folded_reference,
):
    model, folder = tiny_folder("qwen3_5")
    plan = Plan.from_dict(ALL_AXES)
    addon, saved = random_addon(model, plan)
    given = prompts((300, 150, 33, 7))
    expected = folded_reference(model, addon, plan, given)
    started = engine(folder, model.config, saved, **settings)
    for _ in range(2):  # the second time in blocks that hold what others have left
        made = generate(started, given)
        assert made.tokens == expected.tokens
        assert made.gap(expected) < CLOSE


REPLAY = 48
SKIP = {
    "depth": [{"method": "ced", "split": 6, "layers": [7, 9, 11]}],
    "prefill": "skip",
    "window": REPLAY,
    "replay": REPLAY,
}


def slow_to_forget(model):
    """So that what states held before the replay still shows after it."""
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.A_log.fill_(-4)


@pytest.mark.parametrize("projected", [False, True], ids=["cleared", "projected"])
def test_skipped_prompts_replay_into_recurrent_states_as_in_the_runtime(
    projected,
    plain_delta,
    tiny_folder,
    random_addon,
    prompts,
    engine,
    generate,
    grown_reference,
    decoder_of,
):
    model, folder = tiny_folder("qwen3_5", change=slow_to_forget)
    plan = Plan.from_dict({**SKIP, "state_projector": projected})
    addon, saved = random_addon(model, plan)
    given = prompts((300, 33, REPLAY + 3, 150))
    expected = grown_reference(model, addon, plan, given, 6)
    started = engine(folder, model.config, saved)
    skipping = decoder_of(started).kvfold
    left_out = skipping.rows_left_out
    for _ in range(2):  # the second time in blocks that hold what others have left
        made = generate(started, given, 6)
        assert made.tokens == expected.tokens
        assert made.gap(expected) < CLOSE
    assert skipping.rows_left_out - left_out == 2 * (300 + 150 - 2 * (REPLAY + 4))
