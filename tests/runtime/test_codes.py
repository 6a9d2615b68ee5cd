"""Codes on their way into slots, against all records of a row pooled at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold
from kvfold.methods import Pipeline, build_pipelines
from kvfold.plan import Plan
from kvfold.runtime.codes import CodeStore
from kvfold.runtime.schedule import Schedule, Step

LAYER = 2
CPU = torch.device("cpu")

schedules = st.builds(
    Schedule, anchors=st.integers(0, 5), window=st.integers(0, 9), group=st.integers(1, 5)
)
chunks = st.lists(st.integers(0, 11), min_size=1, max_size=7)
"""Tokens of a row in each of several steps."""


@pytest.fixture(scope="module")
def described(tiny_config: Any) -> Any:
    """A tiny Llama's."""
    return kvfold.anatomy(tiny_config("llama"))


def pipeline(described: Any, group: int, *, overlap: bool) -> Pipeline:
    """One layer's own keys and values, pooled by a random gate of each head."""
    pool = {"method": "pool", "layers": [LAYER], "group": group, "gate": "head", "overlap": overlap}
    (made,) = build_pipelines(Plan.from_dict({"sequence": [pool]}), described).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    assert isinstance(made, Pipeline)
    return made


def records_of(pipe: Pipeline, rows: int, tokens: int) -> torch.Tensor:
    """Records of whole rows, (rows, tokens, record_width)."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(rows, tokens, pipe.record_width, generator=generator, dtype=torch.float64)


def slots_by_hand(pipe: Pipeline, records: torch.Tensor, anchors: int) -> torch.Tensor:
    """All slots of one row's records, (tokens, record_width) to (slots, code_width)."""
    group = pipe.group
    beyond = records[anchors:]
    count = len(beyond) // group
    if count == 0:
        return records.new_zeros(0, pipe.depth.code_width)
    whole = beyond[: count * group]
    lead = whole.new_zeros(group if pipe.overlap else 0, whole.shape[-1])
    has_before = torch.arange(count)[None] > 0
    with torch.no_grad():
        return pipe.slots(torch.cat([lead, whole])[None], has_before)[0]


def steps_of(schedule: Schedule, rows: Sequence[Sequence[int]]) -> list[Step]:
    """The steps of rows that get so many tokens each time, pads to the left."""
    made, before = [], [0] * len(rows)
    for counts in zip(*rows, strict=True):
        new = max(1, *counts)
        step = Step(schedule, before, new, list(counts), folded=True, device=CPU)
        before = step.after
        made.append(step)
    return made


def columns(step: Step, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The step's columns of the rows' records, noise where a column is a pad."""
    width = rows[0].shape[-1]
    found = torch.full((len(rows), 1, step.new, width), 1e6, dtype=torch.float64)
    for row, records in enumerate(rows):
        count = step.after[row] - step.before[row]
        if count:
            found[row, 0, -count:] = records[step.before[row] : step.after[row]]
    return found


def equal_lengths(rows: list[list[int]]) -> list[list[int]]:
    """As many steps for every row."""
    most = max(len(row) for row in rows)
    return [row + [0] * (most - len(row)) for row in rows]


@settings(max_examples=120, deadline=None)
@given(schedules, st.lists(chunks, min_size=1, max_size=3).map(equal_lengths), st.booleans())
def test_slots_are_those_of_all_tokens_at_once(
    described: Any, schedule: Schedule, counts: list[list[int]], overlap: bool
) -> None:
    """However the tokens come: every made slot is stored in order, every row by itself."""
    pipe = pipeline(described, schedule.group, overlap=overlap)
    store = CodeStore(pipe, schedule, keep=True, late=False)
    rows = [records_of(pipe, 1, max(1, sum(row)))[0] for row in counts]
    for step in steps_of(schedule, counts):
        store.publish(step, columns(step, rows))
        store.commit(step)
    assert store.pending is None
    for row, (records, own) in enumerate(zip(rows, counts, strict=True)):
        seen = sum(own)
        expected = slots_by_hand(pipe, records[:seen], schedule.anchors)
        assert len(expected) == schedule.made(seen)
        if len(expected):
            stored = store.slots.read(slice(0, len(expected)))[row, 0]
            torch.testing.assert_close(stored, expected)


@settings(max_examples=120, deadline=None)
@given(schedules, st.lists(chunks, min_size=1, max_size=3).map(equal_lengths), st.booleans())
def test_slots_leave_the_window_in_order_and_once(
    described: Any, schedule: Schedule, counts: list[list[int]], overlap: bool
) -> None:
    """What becomes visible in a step are the codes of those slots, though made long before."""
    pipe = pipeline(described, schedule.group, overlap=overlap)
    store = CodeStore(pipe, schedule, keep=False, late=True)
    rows = [records_of(pipe, 1, max(1, sum(row)))[0] for row in counts]
    expected = [slots_by_hand(pipe, records, schedule.anchors) for records in rows]
    for step in steps_of(schedule, counts):
        store.publish(step, columns(step, rows))
        if any(step.exits):
            codes = store.exits(step)
            assert codes.shape[2] == max(len(span) for span in step.exits)
            for row in range(len(rows)):
                span = step.exits[row % len(step.exits)]
                left = codes[row, 0, : len(span)]
                torch.testing.assert_close(left, expected[row][span.start : span.stop])
        store.commit(step)
    assert not store.slots.stores[0].tensors()


def fed(
    pipe: Pipeline, schedule: Schedule, records: torch.Tensor, *, keep: bool = True
) -> CodeStore:
    """A store that has seen rows of records, (rows, tokens, record_width), three at a time."""
    store = CodeStore(pipe, schedule, keep=keep, late=True)
    feed(store, schedule, records, 0)
    return store


def feed(store: CodeStore, schedule: Schedule, records: torch.Tensor, start: int) -> None:
    """Go on from token `start`."""
    rows, length = records.shape[:2]
    for first in range(start, length, 3):
        new = min(3, length - first)
        step = Step(schedule, [first] * rows, new, [new] * rows, folded=True, device=CPU)
        store.publish(step, records[:, None, first : first + new])
        store.commit(step)


def contents(store: CodeStore) -> list[torch.Tensor]:
    """Every tensor of a store."""
    waiting = [t for t in (store.partial, store.pending) if t is not None]
    return [*waiting, *(t for held in store.slots.stores for t in held.tensors().values())]


def test_what_waits_is_bounded_and_what_is_kept_is_not(described: Any) -> None:
    """An unfinished group, the group before it, and the slots of the window."""
    schedule = Schedule(anchors=2, window=9, group=4)
    pipe = pipeline(described, 4, overlap=True)
    short, long = (fed(pipe, schedule, records_of(pipe, 1, n)) for n in (20, 600))
    for store in (short, long):
        assert store.partial is not None and store.pending is not None
        assert store.partial.shape == (1, 1, 3 + 4, pipe.record_width)
        assert store.pending.shape == (1, 1, 3, pipe.depth.code_width)
    assert contents(long)[-1].shape[2] > contents(short)[-1].shape[2]


def test_a_group_of_one_waits_for_nothing(described: Any) -> None:
    """A token is a slot at once."""
    schedule = Schedule(anchors=2, window=9, group=1)
    store = fed(
        pipeline(described, 1, overlap=False),
        schedule,
        records_of(pipeline(described, 1, overlap=False), 1, 20),
    )
    assert store.partial is not None and store.partial.numel() == 0


def test_rows_can_be_chosen(described: Any) -> None:
    """`map` reaches all that a store holds."""
    schedule = Schedule(anchors=1, window=6, group=4)
    pipe = pipeline(described, 4, overlap=True)
    records = records_of(pipe, 3, 33)
    store = fed(pipe, schedule, records)
    store.map(lambda tensor: tensor[[2, 0]])
    for ours, theirs in zip(
        contents(store), contents(fed(pipe, schedule, records[[2, 0]])), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_copy_goes_on_by_itself(described: Any) -> None:
    """Neither notices what the other is given."""
    schedule = Schedule(anchors=1, window=6, group=4)
    pipe = pipeline(described, 4, overlap=True)
    records = records_of(pipe, 1, 60)
    store = fed(pipe, schedule, records[:, :30])
    before = [tensor.clone() for tensor in contents(store)]
    copied = store.copied()
    feed(copied, schedule, records, 30)
    for tensor, was in zip(contents(store), before, strict=True):
        assert torch.equal(tensor, was)
    for ours, theirs in zip(contents(copied), contents(fed(pipe, schedule, records)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_store_that_was_reset_is_as_good_as_new(described: Any) -> None:
    """Storage included."""
    schedule = Schedule(anchors=1, window=6, group=4)
    pipe = pipeline(described, 4, overlap=False)
    store = fed(pipe, schedule, records_of(pipe, 1, 40))
    store.reset()
    assert contents(store) == []
    assert not store.published
    records = records_of(pipe, 1, 25)
    feed(store, schedule, records, 0)
    for ours, theirs in zip(contents(store), contents(fed(pipe, schedule, records)), strict=True):
        assert torch.equal(ours, theirs)
