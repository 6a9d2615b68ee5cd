"""Shared and absorbed reading compute what expanded reading computes, from fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.anatomy import attention_module, k_norm_weight
from kvfold.runtime.ledger import Ledger, plain_bytes, predict_bytes

FLOAT64_AGREEMENT = 1e-9


@contextmanager
def _float64_k_norms(case: Any) -> Iterator[None]:
    """Models norm keys in float32 whatever their dtype; here in float64, to compare to 1e-9."""
    family = case.anatomy.family
    patched = []
    for index in case.anatomy.foldable_layers:
        found = k_norm_weight(family, attention_module(case.model, index))
        if found is not None:
            norm = attention_module(case.model, index).k_norm
            norm.forward = _exact_norm(*found)
            patched.append(norm)
    try:
        yield
    finally:
        for norm in patched:
            del norm.forward


def _exact_norm(weight: Tensor, epsilon: float) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    return forward


@pytest.mark.unquantised
@pytest.mark.from_codes
def test_readings_agree_in_float64(
    case: Any, helpers: Any, arch: str, method: str, reading: str
) -> None:
    """Logits of a prompt, decode steps and a second turn agree within 1e-9."""
    _check_readings(case(arch, method), helpers, "expanded", reading)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "smollm3"])
@pytest.mark.parametrize(
    "method", ["latent+k8v4", "csa2+k4v2", "latent+pool+k8v4", "csa2+pool+k4v4"]
)
def test_quantised_codes_are_rebuilt_and_absorbed_alike(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """The same where a whole head is rotary or none of it, so that only codes are stored.

    Other readings of quantised slots differ by design: expanded quantises each layer's keys and
    values, after RoPE; absorbed keeps the rotary part of a head by itself. `test_reference` has
    each of them by itself.
    """
    _check_readings(case(arch, method), helpers, "shared", "absorbed")


def _check_readings(made: Any, helpers: Any, first: str, second: str) -> None:
    ids = helpers.tokens(60)
    cuts = [(0, 33), (33, 34), (34, 35), (35, 60)]
    outputs = []
    with _float64_k_norms(made):
        for reading in (first, second):
            with made.attach(resident=reading) as attachment:
                cache = attachment.new_cache()
                outputs.append(torch.cat([made.run(ids[:, a:b], cache) for a, b in cuts], dim=1))
    torch.testing.assert_close(*outputs, atol=FLOAT64_AGREEMENT, rtol=FLOAT64_AGREEMENT)


@pytest.mark.parametrize("length", [3, 40, 150])
def test_reported_bytes_are_allocated_bytes_and_as_predicted(
    case: Any, helpers: Any, arch: str, method: str, reading: str, length: int
) -> None:
    """`nbytes` equals the storages, and `predict_bytes` equals both, by component."""
    made = case(arch, method, dtype=torch.float32, resident=reading)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        made.run(helpers.tokens(length, rows=2), cache)
    counted = cache.nbytes()
    assert counted.total == helpers.storages(cache)
    predicted = predict_bytes(made.plan, made.anatomy, length, batch=2, element_size=4)
    # A sliding layer's keys are a view of the last forward's longer tensor in transformers, so
    # the model's own part can be larger than what it needs.
    for component, count in predicted.components.items():
        if component != "plain" or arch != "gemma3":
            assert counted[component] == count, component


@pytest.mark.parametrize("length", [1, 7])
def test_bytes_of_the_plain_model_are_allocated_bytes_and_as_predicted(
    case: Any, helpers: Any, arch: str, length: int
) -> None:
    """Up to its window, beyond which a sliding layer's keys are a view of longer ones."""
    made = case(arch, "identity", dtype=torch.float32)
    cache = DynamicCache(config=made.model.config)
    helpers.run(made.model, helpers.tokens(length, rows=2), cache)
    counted = Ledger.of_plain(cache)
    assert counted.total == helpers.storages(cache)
    assert counted == plain_bytes(made.anatomy, length, batch=2, element_size=4)


def test_absorbed_hybrid_holds_what_the_design_predicts(helpers: Any) -> None:
    """Qwen3.5-4B's upper layers: 2.9 times fewer bytes than four full copies of the history."""
    from transformers import Qwen3_5TextConfig

    from kvfold.anatomy import anatomy
    from kvfold.plan import Plan

    described = anatomy(Qwen3_5TextConfig(hidden_size=2560, num_hidden_layers=32))
    depth = [{"method": "csa2", "source": 19, "readers": [23, 27, 31]}]
    plan = Plan.from_dict({"anchors": 0, "window": 0, "resident": "absorbed", "depth": depth})
    folded = predict_bytes(plan, described, 4096)
    copies = 4 * 2 * 1024 * 2 * 4096
    assert copies / (folded["slots"] + folded["scales"]) == pytest.approx(2.9, abs=0.05)
    assert plain_bytes(described, 4096)["plain"] == 8 * 2 * 1024 * 2 * 4096


@pytest.mark.parametrize(
    ("reading", "copies_saved"),
    [pytest.param("shared", 4.0, marks=pytest.mark.slow), ("absorbed", 2.9)],
)
def test_4096_tokens_of_full_width_attention_hold_the_predicted_storages(
    tiny_model: Any, helpers: Any, reading: str, copies_saved: float
) -> None:
    """Four attention layers of Qwen3.5-4B's width: shared keeps one copy of four, absorbed 1/2.9.

    The history's own storages, within 2%: one [K; V] of 2,048 values, and for absorbed readers
    64 rotated values and a scale a kv head.
    """
    from transformers import Qwen3_5TextConfig

    from kvfold.anatomy import anatomy
    from kvfold.plan import Plan
    from kvfold.runtime.attach import attach

    assert Qwen3_5TextConfig().head_dim == 256
    model = tiny_model(
        "qwen3_5",
        head_dim=256,
        num_key_value_heads=4,
        num_hidden_layers=16,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 4,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    )
    depth = [{"method": "csa2", "source": 3, "readers": [7, 11, 15]}]
    plan = Plan.from_dict({"anchors": 0, "window": 0, "resident": reading, "depth": depth})
    with attach(model, helpers.random_addon(model, plan)) as attachment:
        cache = attachment.new_cache()
        helpers.run(model, helpers.tokens(4096), cache)
    four_copies = 4 * 2 * 4 * 256 * 4 * 4096
    held = [store for codes in cache.stores.values() for store in codes.slots.stores]
    for index in cache.folded:
        held += cache.folded_layer(index).stores.values()
    history = sum(t.untyped_storage().nbytes() for store in held for t in store.tensors().values())
    assert four_copies / history == pytest.approx(copies_saved, rel=0.02)
    counted, predicted = cache.nbytes(), predict_bytes(plan, anatomy(model), 4096, element_size=4)
    assert counted.components == predicted.components
