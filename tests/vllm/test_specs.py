"""Blocks of anchors and window: which a request holds as its steps go by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

BLOCK, POOL, LONGEST = 4, 400, 400


def manager_of(window: int, anchors: int, tails: int, *, in_parts: bool = False):
    """A manager on a pool of its own; one whose steps run in parts shares prefixes."""
    from vllm.v1.core.block_pool import BlockPool

    from kvfold.vllm.specs import AnchorWindowManager, AnchorWindowSpec

    spec = AnchorWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32,
        sliding_window=window, anchors=anchors, tails=tails, in_parts=in_parts,
    )  # fmt: skip
    pool = BlockPool(POOL, enable_caching=in_parts, hash_block_size=BLOCK)
    return AnchorWindowManager(
        spec, block_pool=pool, enable_caching=in_parts, kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )  # fmt: skip


def take_step(manager, before: int, processed: int, after: int) -> int:
    """What vLLM's scheduler does for a request's step; how many blocks it holds then."""
    pool = manager.block_pool
    manager.remove_skipped_blocks("r", processed)
    wanted = manager.get_num_blocks_to_allocate("r", after, [], before, before, after)
    free = pool.get_num_free_blocks()
    held = len(manager.req_to_blocks["r"])
    new = manager.allocate_new_blocks("r", after, after)
    assert free - pool.get_num_free_blocks() == wanted
    assert len(new) == len(manager.req_to_blocks["r"]) - held
    manager.num_cached_block["r"] = 0  # as after a first step
    return POOL - 1 - pool.get_num_free_blocks()


@settings(deadline=None, max_examples=60)
@given(
    window=st.integers(1, 30),
    anchors=st.integers(0, 9),
    tails=st.integers(0, 2),
    steps=st.lists(st.integers(1, 60), min_size=1, max_size=12),
)
def test_what_later_steps_see_has_blocks_and_no_more_are_held_than_was_said(
    window, anchors, tails, steps
):
    manager = manager_of(window, anchors, tails)
    under_way = max(1, tails)
    most = manager.kv_cache_spec.max_admission_blocks_per_request(
        under_way * max(steps), max_model_len=10_000
    )
    ends = [0]
    for new in steps:
        before, after = ends[-1], ends[-1] + new
        processed = ends[max(0, len(ends) - under_way)]
        held = take_step(manager, before, processed, after)
        ends.append(after)
        assert held <= most
        blocks = manager.req_to_blocks["r"]
        assert len(blocks) == -(-after // BLOCK)
        # The step under way reads behind its beginning, the next one behind its end.
        for end in (processed, before, after):
            for token in (*range(min(anchors, end)), *range(max(0, end - window + 1), end)):
                assert not blocks[token // BLOCK].is_null
        if not tails:
            assert not any(block.is_null for block in blocks[before // BLOCK :])
    manager.free("r")
    assert manager.block_pool.get_num_free_blocks() == POOL - 1
    assert not manager.freed_until


def test_of_a_long_step_only_the_window_and_the_anchors_have_blocks():
    whole, tail = manager_of(9, 4, 0), manager_of(9, 4, 1)
    assert take_step(whole, 0, 0, 100) == 25
    assert take_step(tail, 0, 0, 100) == 1 + 2
    assert take_step(tail, 100, 100, 200) == 1 + 2 + 2
    assert take_step(tail, 200, 200, 201) == 1 + 2 + 1


HASHES = [bytes([number]) * 32 for number in range(10)]
"""Of the blocks of one text, from which all prompts are."""


def run_prompt(manager, name: str, length: int, ends: tuple[int, ...]) -> None:
    """A prompt of so many tokens in steps with these ends, as vLLM's scheduler sees to it."""
    request = SimpleNamespace(request_id=name, block_hashes=HASHES, shared_prefix_boundary=0)
    for end in ends:
        manager.new_step_starts()
        manager.allocate_new_blocks(name, end, end)
        manager.cache_blocks(request, end, 0, replay_boundaries=(length - 1,))


def test_a_window_that_was_left_is_not_shared_while_a_step_writes_its_slots_again():
    """The longer prompt leaves its window elsewhere, but slots of all of its tokens."""
    manager = manager_of(9, 0, 0, in_parts=True)
    run_prompt(manager, "first", 21, (20,))
    manager.free("first")
    run_prompt(manager, "longer", 41, (16, 40))
    blocks, found = manager.find_longest_cache_hit(
        HASHES, 20, [0], manager.block_pool, manager.kv_cache_spec, False, BLOCK
    )
    assert found == 20

    def wanted() -> int:
        return manager.get_num_blocks_to_allocate("again", 21, blocks[0], 20, 20, 21)

    assert wanted() > POOL
    manager.new_step_starts()
    assert wanted() <= 1 + 2
