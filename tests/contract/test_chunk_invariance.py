"""The law: prefilling n tokens equals prefilling k and feeding the rest, for every k.

The tolerance is explained in conftest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch


def _state(cache: Any) -> list[torch.Tensor]:
    """The visible contents of every folded layer: exact places in order, then slots and codes."""
    schedule, seen = cache.schedule, cache.rows[0]
    exact = min(seen, schedule.exact_size)
    slots = schedule.slots(seen)
    parts = []
    for index in sorted(cache.folded):
        layer = cache.folded_layer(index)
        parts += [layer.keys[:, :, :exact], layer.values[:, :, :exact]]
        if layer.fold.reading == "expanded":
            fixed = schedule.exact_size
            parts += [layer.keys[:, :, fixed : fixed + slots]]
            parts += [layer.values[:, :, fixed : fixed + slots]]
        if layer.rotary is not None:
            parts.append(layer.rotary[:, :, :slots])
    for store in cache.stores.values():
        kept = (
            max(0, seen - schedule.anchors)
            if store.keep
            else min(max(0, seen - schedule.anchors), schedule.ring_size)
        )
        if store.codes is not None:
            parts.append(store.codes[:, :, :kept])
    return parts


def _check_every_split(case: Any, helpers: Any, ids: torch.Tensor, splits: range) -> None:
    length = ids.shape[1]
    with case.attach() as attachment:
        whole = case.run(ids, attachment.new_cache())
        stepping = attachment.new_cache()
        stepped = {}
        for position in range(length):
            logits = case.run(ids[:, position : position + 1], stepping)
            helpers.assert_same(logits[:, 0], whole[:, position])
            if position + 1 in splits:
                stepped[position + 1] = [part.clone() for part in _state(stepping)]
        for split in splits:
            cache = attachment.new_cache()
            first = case.run(ids[:, :split], cache)
            for ours, theirs in zip(_state(cache), stepped[split], strict=True):
                helpers.assert_same(ours, theirs)
            rest = case.run(ids[:, split:], cache) if split < length else first[:, :0]
            joined = torch.cat([first, rest], dim=1)
            helpers.assert_same(joined, whole)
            assert cache.seen_tokens == [length]
            assert cache.get_seq_length() == length


def test_every_split_of_40_tokens(case: Any, helpers: Any, arch: str, method: str) -> None:
    """Prefill k then one by one, or in one chunk, for every k: same state, same logits."""
    made = case(arch, method, resident="expanded")
    _check_every_split(made, helpers, helpers.tokens(40), range(1, 41))


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "smollm3"])
def test_every_split_when_history_is_read_from_codes(
    case: Any, helpers: Any, arch: str, method: str, reading: str
) -> None:
    """The same where keys and values are rebuilt or absorbed while reading."""
    if reading == "expanded" or (reading == "absorbed" and method in helpers.non_linear):
        reading = "shared"
    made = case(arch, method, resident=reading, window=5, anchors=2)
    _check_every_split(made, helpers, helpers.tokens(40), range(1, 41, 3))


@pytest.mark.parametrize("method", ["identity", "ced", "csa2-joint", "latent"])
def test_splits_around_a_window_of_128(case: Any, helpers: Any, arch: str, method: str) -> None:
    """Every split at 127 to 137 tokens, where the default window begins to fold."""
    made = case(arch, method, window=128)
    _check_every_split(made, helpers, helpers.tokens(140), range(127, 138))


@pytest.mark.parametrize("anchors", [0, 3])
def test_every_split_without_a_window(
    case: Any, helpers: Any, arch: str, method: str, anchors: int
) -> None:
    """W=0: a token sees even itself through its slot (methods whose code exists in time)."""
    if method in helpers.needs_window:
        method = "ced-csa2"
    made = case(arch, method, window=0, anchors=anchors)
    _check_every_split(made, helpers, helpers.tokens(24), range(1, 25))


def test_long_prompts_are_cut_into_chunks_without_a_trace(
    case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The runtime's own chunks and blocks of queries and slots change nothing."""
    import kvfold.runtime.attention as attention
    import kvfold.runtime.forward as forward

    made = case("llama", method, resident="auto")
    ids = helpers.tokens(90)
    with made.attach() as attachment:
        whole = made.run(ids, attachment.new_cache())
        monkeypatch.setattr(forward, "PREFILL_CHUNK", 7)
        monkeypatch.setattr(attention, "QUERY_BLOCK", 3)
        monkeypatch.setattr(attention, "SLOT_BLOCK", 5)
        cut = made.run(ids, attachment.new_cache())
    helpers.assert_same(cut, whole)
