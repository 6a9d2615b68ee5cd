"""A folded cache refuses what it can't do, and says so before anything is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvfold.anatomy import anatomy
from kvfold.errors import AttachError, CacheError
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.store.addon import AddOn

POOL = {"sequence": [{"method": "pool", "layers": [0, 1, 2, 3, 4, 5], "gate": "mean"}]}
BITS = {"bits": [{"method": "turboquant", "layers": [0, 1, 2, 3, 4, 5]}]}


@pytest.fixture
def model(tiny_model: Any) -> Any:
    return tiny_model("llama")


def _attached(model: Any, **keys: Any) -> Any:
    plan = Plan.from_dict({"window": 8, **keys})
    return attach(model, AddOn.untrained(model, plan))


def _feed(model: Any, cache: Any, count: int, rows: int = 1, mask: Any = None) -> Any:
    ids = torch.arange(5, 5 + count).repeat(rows, 1)
    with torch.no_grad():
        return model(ids, cache=cache, attention_mask=mask).logits


def test_columns_with_pads_can_not_be_cropped(model: Any) -> None:
    """Or rows would lose tokens that they never had in those columns."""
    with _attached(model, window=60, **BITS) as attachment:
        cache = attachment.new_cache()
        _feed(model, cache, 10, rows=2)
        mask = torch.ones(2, 13, dtype=torch.long)
        mask[1, 10:12] = 0
        _feed(model, cache, 3, rows=2, mask=mask)
        assert cache.seen_tokens == [13, 11]
        with pytest.raises(CacheError, match="pads of some rows"):
            cache.crop(-3)
        cache.crop(-1)
        assert cache.seen_tokens == [12, 10]


def test_a_group_that_is_pooled_can_not_be_cropped(model: Any) -> None:
    with _attached(model, window=60, anchors=0, **POOL) as attachment:
        cache = attachment.new_cache()
        _feed(model, cache, 10)
        with pytest.raises(CacheError, match="pooled already"):
            cache.crop(-3)
        before = copy.deepcopy(cache)
        kept = _feed(model, before, 1)
        cache.crop(-1)
        _feed(model, cache, 1)
        assert cache.seen_tokens == [10]
        assert torch.isfinite(kept).all()


def test_layers_that_can_not_go_back_are_not_cropped(tiny_model: Any) -> None:
    model = tiny_model("qwen3_5")
    layers = list(anatomy(model).foldable_layers)
    plan = Plan.from_dict({"window": 40, "depth": [{"method": "identity", "layers": layers}]})
    with attach(model, AddOn.untrained(model, plan)) as attachment:
        cache = attachment.new_cache()
        _feed(model, cache, 12)
        with pytest.raises(CacheError, match="recurrent state"):
            cache.crop(-2)
        assert cache.seen_tokens == [12]


@pytest.mark.parametrize("keys", [POOL, BITS, {**POOL, **BITS}], ids=["pool", "bits", "both"])
@pytest.mark.parametrize("count", [1, 4])
def test_values_that_are_not_finite_are_named_by_layer_and_token(
    model: Any, keys: dict[str, Any], count: int
) -> None:
    with _attached(model, **keys) as attachment:
        cache = attachment.new_cache()
        _feed(model, cache, 30)
        weight = model.model.layers[2].self_attn.k_proj.weight
        with torch.no_grad():
            weight[0, 0] = torch.nan
        with pytest.raises(CacheError, match=r"layers \[2\] has NaN or infinity at token 30"):
            _feed(model, cache, count)
        with pytest.raises(CacheError, match="failed half-way"):
            _feed(model, cache, 1)


@pytest.mark.parametrize("count", [1, 4])
def test_slots_that_are_too_large_for_their_scale_are_told(tiny_model: Any, count: int) -> None:
    model = tiny_model("llama")
    with _attached(model, **BITS) as attachment:
        cache = attachment.new_cache()
        _feed(model, cache, 30)
        with torch.no_grad():
            model.model.layers[2].self_attn.v_proj.weight.mul_(1e8)
        with pytest.raises(CacheError, match=r"at most 65,504; that of layers \[2\].* token 30"):
            _feed(model, cache, count)


def test_keys_too_large_for_half_precision_are_stored_finite(tiny_model: Any) -> None:
    model = tiny_model("llama", dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(2000.0)
    with _attached(model, **BITS) as attachment:
        cache = attachment.new_cache()
        _feed(model, cache, 40)
        for layer in range(6):
            for store in cache.folded_layer(layer).stores.values():
                assert torch.isfinite(store.scales).all()


def test_a_copy_of_an_adopted_cache_is_refused(model: Any) -> None:
    """It would start anew in silence."""
    with _attached(model, **POOL) as attachment:
        given = DynamicCache(config=model.config)
        _feed(model, given, 30)
        assert given.get_seq_length() == 30
        with pytest.raises(AttachError, match="with tokens in it"):
            _feed(model, copy.deepcopy(given), 2)
        whole = _feed(model, attachment.new_cache(), 30)
        given.reset()
        torch.testing.assert_close(_feed(model, given, 30), whole)
    with _attached(model, **POOL), pytest.raises(AttachError, match="with tokens in it"):
        _feed(model, given, 2)


def test_an_empty_cache_can_be_reordered(model: Any) -> None:
    with _attached(model, **POOL) as attachment:
        cache = attachment.new_cache()
        cache.reorder_cache(torch.tensor([0]))
        assert cache.seen_tokens == []
