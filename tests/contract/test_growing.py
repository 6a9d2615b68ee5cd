"""A long window's rings take room as they fill, and hold then what they would always have held."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from kvfold.runtime.ledger import predict_bytes

WINDOW = 40
CUTS = [0, 3, 20, 21, 22, 23, 47, 48, 49, 80]
"""Ends of calls: within anchors, window and history, and single tokens where a ring is full."""
CASES = [
    ("llama", "latent", "expanded"),
    ("llama", "latent+k8v4", "shared"),
    ("qwen3", "ced-csa2", "expanded"),
    ("llama", "pool-head-overlap", "expanded"),
    ("qwen3_5", "csa2+k4v2", "absorbed"),
]


@pytest.mark.parametrize(("arch", "method", "reading"), CASES)
def test_at_every_length_the_bytes_are_those_that_its_tokens_need(
    case: Any, helpers: Any, arch: str, method: str, reading: str
) -> None:
    """Allocated, reported and predicted agree after each call, and room doubles on the way."""
    made = case(arch, method, dtype=torch.float32, window=WINDOW, resident=reading)
    ids = helpers.tokens(CUTS[-1], rows=2)
    rooms = []
    with made.attach() as attachment:
        cache = attachment.new_cache()
        for start, stop in pairwise(CUTS):
            made.run(ids[:, start:stop], cache)
            counted = cache.nbytes()
            assert counted.total == helpers.storages(cache)
            told = predict_bytes(made.plan, made.anatomy, stop, batch=2, element_size=4)
            assert counted == told
            rooms.append(counted["anchors"] + counted["window"])
    token = rooms[0] // 4
    size = cache.folded_layer(min(cache.folded)).schedule.exact_size
    assert [room // token for room in rooms] == [4, 32, 32, 32, 32, *[size] * 4]


@pytest.mark.parametrize(("arch", "method", "reading"), CASES)
def test_a_ring_that_grows_gives_what_one_of_full_size_gives(
    case: Any, helpers: Any, arch: str, method: str, reading: str, monkeypatch: Any
) -> None:
    made = case(arch, method, window=WINDOW, resident=reading)
    ids = helpers.tokens(CUTS[-1], rows=2)
    outputs, states = [], []
    for first in (4, 1024):
        monkeypatch.setattr("kvfold.runtime.schedule.FIRST_PLACES", first)
        with made.attach() as attachment:
            cache = attachment.new_cache()
            outputs.append([made.run(ids[:, a:b], cache) for a, b in pairwise(CUTS)])
            states.append([helpers.state(cache, row) for row in range(2)])
    for ours, theirs in zip(*outputs, strict=True):
        helpers.assert_same(ours, theirs)
    for one, other in zip(*states, strict=True):
        helpers.assert_same_state(one, other)


@pytest.mark.parametrize(("arch", "method", "reading"), CASES[:2])
def test_a_ring_that_was_cropped_goes_on_growing(
    case: Any, helpers: Any, arch: str, method: str, reading: str
) -> None:
    """Its room stays, and is told; what comes next is as if the rest had never been."""
    made = case(arch, method, window=WINDOW, resident=reading)
    ids = helpers.tokens(60)
    with made.attach() as attachment:
        cache, fresh = attachment.new_cache(), attachment.new_cache()
        made.run(ids[:, :30], cache)
        cache.crop(-25)
        assert cache.nbytes().total == helpers.storages(cache)
        made.run(ids[:, :5], fresh)
        helpers.assert_same(made.run(ids[:, 5:], cache), made.run(ids[:, 5:], fresh))
        cache.reset()
        assert cache.nbytes().total == helpers.storages(cache) == 0
        made.run(ids[:, :5], cache)
        assert cache.nbytes() == predict_bytes(made.plan, made.anatomy, 5, element_size=8)


def test_a_window_of_many_thousand_tokens_costs_a_short_text_little(
    case: Any, helpers: Any, monkeypatch: Any
) -> None:
    """300 tokens take 512 places of 65,540, and no more codes that wait."""
    monkeypatch.undo()
    made = case("llama", "latent", window=65_536)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        made.run(helpers.tokens(300), cache)
    assert cache.nbytes().total == helpers.storages(cache)
    folded = cache.folded_layer(min(cache.folded))
    assert folded.keys.shape[2] == 512
    (store,) = cache.stores.values()
    assert store.pending.shape[2] == 512
