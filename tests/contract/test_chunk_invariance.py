"""The law: prefilling n tokens equals prefilling k and feeding the rest, for every k.

Tolerances are explained in conftest.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch


def _check_every_split(
    case: Any, helpers: Any, ids: torch.Tensor, splits: range, start: int = 0
) -> None:
    """Prefill k and then one by one, and prefill k and then the rest at once: state and logits.

    start: tokens that the one-by-one run prefills; every split is after it.
    """
    length = ids.shape[1]
    with case.attach() as attachment:
        ended = attachment.new_cache()
        whole = case.run(ids, ended)
        stepping = attachment.new_cache()
        logits = [case.run(ids[:, :start], stepping)] if start else []
        stepped = {}
        for position in range(start, length):
            logits.append(case.run(ids[:, position : position + 1], stepping))
            if position + 1 in splits:
                stepped[position + 1] = copy.deepcopy(helpers.state(stepping))
        flipped = helpers.assert_same_state(helpers.state(stepping), helpers.state(ended))
        helpers.assert_same(torch.cat(logits, dim=1), whole, helpers.tolerance(flipped))
        for split in splits:
            cache = attachment.new_cache()
            first = case.run(ids[:, :split], cache)
            helpers.assert_same_state(helpers.state(cache), stepped[split])
            rest = case.run(ids[:, split:], cache) if split < length else first[:, :0]
            flipped = helpers.assert_same_state(helpers.state(cache), helpers.state(ended))
            joined = torch.cat([first, rest], dim=1)
            helpers.assert_same(joined, whole, helpers.tolerance(flipped))
            assert cache.seen_tokens == [length]
            assert cache.get_seq_length() == length


@pytest.mark.every_family
def test_every_split_of_40_tokens(case: Any, helpers: Any, arch: str, method: str) -> None:
    """Prefill k then one by one, or in one chunk, for every k: same state, same logits.

    On most families a method meets every fifth k, another fifth on each.
    """
    made = case(arch, method, resident="expanded")
    _check_every_split(made, helpers, helpers.tokens(40), helpers.splits_of(method, arch, 40))


@pytest.mark.on_families("llama", "qwen3_5", "smollm3")
@pytest.mark.from_codes
def test_every_split_when_history_is_read_from_codes(
    case: Any, helpers: Any, arch: str, method: str, reading: str
) -> None:
    """The same where keys and values are rebuilt or absorbed while reading."""
    made = case(arch, method, resident=reading, anchors=2)
    made.plan = made.plan.replace(window=max(5, made.largest_group))
    every = 3 if method in helpers.methods else 5
    _check_every_split(made, helpers, helpers.tokens(40), range(1, 41, every))


@pytest.mark.parametrize("method", ["identity", "ced", "csa2-joint", "latent"])
def test_splits_around_a_window_of_128(case: Any, helpers: Any, arch: str, method: str) -> None:
    """Every split at 127 to 137 tokens, where the default window begins to fold."""
    made = case(arch, method, window=128)
    _check_every_split(made, helpers, helpers.tokens(140), range(127, 138))


@pytest.mark.compositions
@pytest.mark.one_family
def test_260_tokens_split_around_a_window_of_128(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """The same splits, and then on until half of the tokens are history."""
    made = case(arch, method, window=128)
    _check_every_split(made, helpers, helpers.tokens(260), range(127, 138), start=126)


def test_chunks_of_any_size(case: Any, helpers: Any, arch: str, method: str) -> None:
    """Uneven chunks after each other, longer and shorter than a group and than the window."""
    made = case(arch, method, anchors=0)
    ids = helpers.tokens(70)
    cuts = [0, 3, 4, 9, 11, 12, 13, 30, 31, 38, 47, 48, 70]
    with made.attach() as attachment:
        whole, chunked = attachment.new_cache(), attachment.new_cache()
        expected = made.run(ids, whole)
        parts = [made.run(ids[:, start:stop], chunked) for start, stop in pairwise(cuts)]
    flipped = helpers.assert_same_state(helpers.state(chunked), helpers.state(whole))
    helpers.assert_same(torch.cat(parts, dim=1), expected, helpers.tolerance(flipped))


@pytest.mark.without_window
@pytest.mark.parametrize("anchors", [0, 3])
def test_every_split_without_a_window(
    case: Any, helpers: Any, arch: str, method: str, anchors: int
) -> None:
    """W=0: a token sees even itself through its slot (methods whose code exists in time)."""
    made = case(arch, method, window=0, anchors=anchors)
    _check_every_split(made, helpers, helpers.tokens(24), helpers.splits_of(method, arch, 24))


def test_long_prompts_are_cut_into_chunks_without_a_trace(
    case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The runtime's own chunks and blocks of queries and slots change nothing."""
    import kvfold.runtime.forward as forward
    import kvfold.runtime.masks as masks
    import kvfold.runtime.streaming as streaming

    made = case("llama", method, resident="auto")
    ids = helpers.tokens(90)
    with made.attach() as attachment:
        whole = made.run(ids, attachment.new_cache())
        monkeypatch.setattr(forward, "PREFILL_CHUNK", 7)
        monkeypatch.setattr(masks, "QUERY_BLOCK", 3)
        monkeypatch.setattr(streaming, "SLOT_BLOCK", 5)
        cut = made.run(ids, attachment.new_cache())
    helpers.assert_same(cut, whole)
