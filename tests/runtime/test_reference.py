"""The dense reference against a loop that looks at one query and one key at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.runtime.reference import reference_attention, reference_mask

EXACT = 1e-12
"""Float64 sums in another order."""


def _looped(queries, keys, values, slot_keys, slot_values, anchors, window, group, scaling):
    batch, heads, count, _ = queries.shape
    seq, slots = keys.shape[2], slot_keys.shape[2]
    out = torch.zeros_like(queries)
    for row in range(batch):
        for head in range(heads):
            kv = head * keys.shape[1] // heads
            for index in range(count):
                t = seq - count + index
                end = anchors + group * (max(0, t + 1 - anchors - window) // group)
                seen = [
                    (keys[row, kv, p], values[row, kv, p])
                    for p in range(t + 1)
                    if p < anchors or p >= end
                ]
                seen += [
                    (slot_keys[row, kv, g], slot_values[row, kv, g])
                    for g in range(slots)
                    if anchors + group * (g + 1) <= end
                ]
                weights = [
                    math.exp(scaling * float(queries[row, head, index] @ k)) for k, _ in seen
                ]
                mixed = sum(w * v for w, (_, v) in zip(weights, seen, strict=True))
                out[row, head, index] = mixed / sum(weights)
    return out


@pytest.mark.parametrize(
    ("anchors", "window", "group"), [(2, 3, 1), (0, 0, 1), (1, 2, 3), (4, 1, 1)]
)
@pytest.mark.parametrize("count", [9, 4])
def test_attention_equals_a_loop_over_queries_and_keys(anchors, window, group, count):
    torch.manual_seed(0)
    queries = torch.randn(2, 4, 9, 6, dtype=torch.float64)[:, :, -count:]
    keys, values = torch.randn(2, 2, 2, 9, 6, dtype=torch.float64)
    slot_keys, slot_values = torch.randn(2, 2, 2, 9, 6, dtype=torch.float64)
    got = reference_attention(
        queries, keys, values, slot_keys, slot_values,
        anchors=anchors, window=window, group=group, scaling=0.3,
    )  # fmt: skip
    expected = _looped(queries, keys, values, slot_keys, slot_values, anchors, window, group, 0.3)
    torch.testing.assert_close(got, expected, rtol=0, atol=EXACT)


def test_slots_that_equal_the_keys_give_causal_attention():
    torch.manual_seed(1)
    queries, keys, values = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    got = reference_attention(
        queries, keys, values, keys[:, :, 2:], values[:, :, 2:], anchors=2, window=3, scaling=0.5
    )
    plain = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=0.5
    )
    torch.testing.assert_close(got, plain, rtol=0, atol=EXACT)


@settings(max_examples=60, deadline=None)
@given(
    anchors=st.integers(0, 5), window=st.integers(0, 6), group=st.integers(1, 4),
    tokens=st.integers(1, 24),
)  # fmt: skip
def test_every_position_up_to_its_own_is_seen_exactly_once(anchors, window, group, tokens):
    slots = max(0, tokens - anchors) // group
    mask = reference_mask(
        torch.arange(tokens), tokens, slots, anchors=anchors, window=window, group=group
    )
    covers = torch.zeros(slots, tokens, dtype=torch.long)
    for slot in range(slots):
        covers[slot, anchors + group * slot : anchors + group * (slot + 1)] = 1
    times = mask[:, :tokens].long() + mask[:, tokens:].long() @ covers
    assert torch.equal(times, torch.ones(tokens, tokens, dtype=torch.long).tril())


def test_window_swings_as_the_second_card_says():
    mask = reference_mask(torch.tensor([300]), 301, 80, anchors=0, window=128, group=4)
    assert int(mask[0, 301:].sum()) == 43
    assert int(mask[0, :301].sum()) == 129
