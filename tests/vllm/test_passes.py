"""Which rows run in which pass, and what states of recurrent layers are read and written."""

from __future__ import annotations

import pytest
import torch

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from kvfold.vllm.passes import some_pieces
from kvfold.vllm.recurrent import RecurrentState, part_of_step
from kvfold.vllm.replay import anchors_and_rest, rows_left_out
from kvfold.vllm.scheduling import hash_unit
from kvfold.vllm.skip import kept_rows

STARTS, SEEN = [0, 1, 21, 51, 54], [40, 20, 90, 3]
"""A decoding request, a prompt's start of 20 tokens, a later chunk of 30, a short prompt."""


def test_parts_of_a_step_hold_each_row_once_and_say_how_far_each_request_is():
    parts = [part_of_step(STARTS, SEEN, first, 8) for first in range(0, 30, 8)]
    rows = torch.cat([part.rows for part in parts])
    assert sorted(rows.tolist()) == list(range(54))
    assert parts[0].requests == [0, 1, 2, 3]
    assert parts[0].lengths == [1, 8, 8, 3]
    assert parts[0].seen == [40, 8, 68, 3]
    assert parts[3].requests == [2]
    assert parts[3].seen == [90]


def test_anchors_run_before_the_replay_and_what_lies_between_is_left_out():
    kept = kept_rows(STARTS, SEEN, replay=6, anchors=2)
    anchors, rest = anchors_and_rest(kept)
    first, last = some_pieces(kept, anchors), some_pieces(kept, rest)
    assert (first.rows.tolist(), first.requests, first.seen) == ([1, 2], [1], [2])
    assert last.lengths == [1, 6, 6, 3]
    assert last.rows.tolist() == [0, *range(15, 21), *range(45, 51), *range(51, 54)]
    assert rows_left_out(kept, STARTS) == {1: range(3, 15), 2: range(21, 45)}


def test_a_state_is_written_as_it_was_read():
    convolved, state = torch.randn(3, 8), torch.randn(2, 4, 6)
    held = RecurrentState(convolved.clone(), state.clone())
    inputs, memory = held.read(kernel=4)
    assert inputs.shape == (1, 8, 4)
    assert memory.shape == (1, 2, 6, 4)
    assert torch.equal(inputs[0, :, 1:], convolved.T)
    held.clear()
    assert not held.state.any() and not held.convolved.any()
    held.write(inputs, memory)
    assert torch.equal(held.convolved, convolved)
    assert torch.equal(held.state, state)


def test_prompts_are_compared_by_whole_slots_of_all_groups():
    pool = {"method": "pool", "layers": [3], "group": 3}
    assert hash_unit(Plan.from_dict({"sequence": [pool]})) == 24
    assert hash_unit(Plan.from_dict({"depth": [{"method": "identity", "layers": [3]}]})) == 8
