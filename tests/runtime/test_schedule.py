"""The integers of folding, against the definition applied token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.runtime.schedule import Schedule, Step

schedules = st.builds(
    Schedule,
    anchors=st.integers(0, 6),
    window=st.integers(0, 9),
    group=st.integers(1, 5),
)

some_row = st.tuples(st.integers(0, 30), st.integers(0, 12))


def test_second_cards_prompt_of_301_tokens_keeps_172_entries() -> None:
    """43 slots, a residual of 1 and 128 in the window; folding fires at 132."""
    card = Schedule(anchors=0, window=128, group=4)
    assert card.slots(301) == 43
    assert 301 - card.folded_until(301) == 129
    assert card.slots(301) + 301 - card.folded_until(301) == 172
    assert compressed(301) == (43, 1, 128)
    assert [card.slots(n) for n in (127, 128, 131, 132, 135, 136)] == [0, 0, 0, 1, 1, 2]


@given(schedules, st.integers(0, 60))
def test_history_grows_by_whole_groups_and_leaves_the_window(schedule: Schedule, seen: int) -> None:
    """b(n) is monotone, aligned, and between W and W + r - 1 tokens before n."""
    until = schedule.folded_until(seen)
    assert (until - schedule.anchors) % schedule.group == 0
    assert schedule.folded_until(seen + 1) >= until
    if until > schedule.anchors:
        assert schedule.window <= seen - until <= schedule.ring_size
    assert int(schedule.folded_until_each(torch.tensor(seen))) == until


@settings(max_examples=200)
@given(
    schedules, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=3)
)
def test_a_step_puts_each_token_where_the_layout_says(
    schedule: Schedule, rows: list[tuple[int, int]]
) -> None:
    """Ring and anchors after a step hold what a token-by-token write would have left."""
    new = max(1, *(count for _, count in rows))
    before, counts = [seen for seen, _ in rows], [count for _, count in rows]
    device = torch.device("cpu")
    step = Step(schedule, before, new, counts, folded=True, device=device)
    size = schedule.exact_size
    held = torch.full((len(rows), 1, size, 1), -1)
    for row, seen in enumerate(before):
        for position in range(seen):
            _place(held, row, position, schedule)
    tokens = torch.arange(new).expand(len(rows), new) + torch.tensor(
        [[seen + count - new] for seen, count in rows]
    )
    expected = held.clone()
    for row, (seen, count) in enumerate(rows):
        for position in range(seen, seen + count):
            _place(expected, row, position, schedule)
    for write in (step.anchor_write, step.ring_write):
        if write is not None:
            write.apply(held, tokens[:, None, :, None])
    assert torch.equal(held, expected)
    told = step.stored_positions(size, written=True).expand(len(rows), size)
    assert torch.equal(told, expected[:, 0, :, 0])


def _place(buffer: torch.Tensor, row: int, position: int, schedule: Schedule) -> None:
    a, ring = schedule.anchors, schedule.ring_size
    if position < a:
        buffer[row, 0, position] = position
    elif ring:
        buffer[row, 0, a + (position - a) % ring] = position


@given(schedules, st.integers(0, 80))
def test_the_places_in_use_are_allocated(schedule: Schedule, seen: int) -> None:
    """Fewer than all only until the ring is full, and never twice as many as are used."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvfold.runtime.schedule.FIRST_PLACES", 1)
        exact, waiting = schedule.exact_places(seen), schedule.pending_places(seen)
    used = min(seen, schedule.exact_size)
    assert used <= exact <= min(schedule.exact_size, 2 * used)
    made = min(schedule.made(seen), schedule.pending_size)
    assert made <= waiting <= min(schedule.pending_size, 2 * made)


def test_the_usual_window_has_its_whole_ring_at_once_and_a_long_one_doubles() -> None:
    """No copy is ever made where a ring is short."""
    for group in (1, 4, 8):
        usual = Schedule(anchors=4, window=128, group=group)
        assert {usual.exact_places(seen) for seen in range(1, 600)} == {usual.exact_size}
    long = Schedule(anchors=4, window=65_536)
    rooms = {long.exact_places(seen) for seen in range(1, 70_000)}
    assert rooms == {256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 65_540}


def compressed(true_len: int, window_size: int = 128, ratio: int = 4) -> tuple[int, int, int]:
    """The second card's schedule, as it writes it: slots, residual and tail."""
    window = min(window_size, true_len)
    compressible = true_len - window
    to_compress = compressible - (compressible % ratio)
    return to_compress // ratio, compressible % ratio, window


def test_every_length_is_kept_as_the_second_card_keeps_it() -> None:
    """Slots, residual and tail of 1 to 600 tokens."""
    card = Schedule(anchors=0, window=128, group=4)
    for length in range(1, 601):
        slots, residual, tail = compressed(length)
        assert card.slots(length) == slots
        assert length - card.folded_until(length) == residual + tail


def test_decoding_folds_at_132_and_keeps_128_to_131() -> None:
    """One token at a time: a group leaves the moment that 132 are there."""
    card = Schedule(anchors=0, window=128, group=4)
    raw, folds = 0, []
    for seen in range(1, 400):
        raw += 1
        if raw == 128 + 4:
            raw -= 4
            folds.append(seen)
        assert seen - card.folded_until(seen) == raw
    assert folds[0] == 132
    assert {later - earlier for earlier, later in pairwise(folds)} == {4}
    assert card.ring_size == 131


@given(schedules, st.integers(0, 80))
def test_slots_are_made_when_their_last_token_comes_and_seen_when_all_have_left(
    schedule: Schedule, seen: int
) -> None:
    """Counted token by token; what is made but not seen is never more than there is room for."""
    a, r = schedule.anchors, schedule.group
    groups = [range(a + r * g, a + r * g + r) for g in range(100)]
    made = sum(group[-1] < seen for group in groups)
    visible = sum(group[-1] < schedule.folded_until(seen) for group in groups)
    assert (schedule.made(seen), schedule.slots(seen)) == (made, visible)
    assert 0 <= made - visible <= schedule.pending_size


rows_of_a_step = st.lists(some_row, min_size=1, max_size=3)


@settings(max_examples=200)
@given(schedules, rows_of_a_step)
def test_a_step_makes_and_shows_each_slot_once(
    schedule: Schedule, rows: list[tuple[int, int]]
) -> None:
    """`completed` and `exits` go on where the steps before have ended."""
    step = _step(schedule, rows)
    for (seen, count), made, exits in zip(
        _alike(step, rows), step.completed, step.exits, strict=True
    ):
        assert list(made) == list(range(schedule.made(seen), schedule.made(seen + count)))
        assert list(exits) == list(range(schedule.slots(seen), schedule.slots(seen + count)))


@settings(max_examples=200)
@given(schedules, rows_of_a_step, st.integers(0, 3), st.booleans())
def test_slots_are_written_in_order_behind_an_offset(
    schedule: Schedule, rows: list[tuple[int, int]], offset: int, made: bool
) -> None:
    """Left-aligned values of each row land at their own numbers, and nothing else is touched."""
    step = _step(schedule, rows)
    spans = step.completed if made else step.exits
    most = max(len(span) for span in spans)
    values = torch.full((len(rows), 1, most, 1), -2)
    held = torch.full((len(rows), 1, offset + 60, 1), -1)
    expected = held.clone()
    for row in range(len(rows)):
        for index, slot in enumerate(spans[row % len(spans)]):
            values[row, 0, index] = slot
            expected[row, 0, offset + slot] = slot
    write = step.slot_write(spans, offset)
    assert (write is None) == (most == 0)
    if write is not None:
        write.apply(held, values)
    assert torch.equal(held, expected)


@settings(max_examples=200)
@given(schedules, rows_of_a_step)
def test_the_last_made_slots_wait_in_a_ring(
    schedule: Schedule, rows: list[tuple[int, int]]
) -> None:
    """Slot s at s mod its size, as if written one by one."""
    step = _step(schedule, rows)
    size = schedule.pending_size
    most = max(1, *(len(span) for span in step.completed))
    values = torch.full((len(rows), 1, most, 1), -2)
    held = torch.full((len(rows), 1, size, 1), -1)
    expected = held.clone()
    for row in range(len(rows)):
        for index, slot in enumerate(step.completed[row % len(step.completed)]):
            values[row, 0, index] = slot
            if size:
                expected[row, 0, slot % size] = slot
    if step.pending_write is not None:
        step.pending_write.apply(held, values)
    assert torch.equal(held, expected)


@settings(max_examples=200)
@given(schedules, rows_of_a_step, st.integers(0, 9))
def test_the_last_tokens_wait_in_a_ring_of_any_size(
    schedule: Schedule, rows: list[tuple[int, int]], size: int
) -> None:
    """Token p at (p - A) mod the size, anchors left out, as if written one by one."""
    step = _step(schedule, rows)
    tokens = torch.arange(step.new).expand(len(rows), step.new) + torch.tensor(
        [[seen + count - step.new] for seen, count in rows]
    )
    held = torch.full((len(rows), 1, size, 1), -1)
    expected = held.clone()
    for row, (seen, count) in enumerate(rows):
        for position in range(max(seen, schedule.anchors), seen + count):
            if size:
                expected[row, 0, (position - schedule.anchors) % size] = position
    write = step.token_write(size)
    if write is not None:
        write.apply(held, tokens[:, None, :, None])
    assert torch.equal(held, expected)


@settings(max_examples=200)
@given(schedules, rows_of_a_step, st.data())
def test_a_slot_lies_among_its_own_tokens(
    schedule: Schedule, rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    """First, mean and last of the positions of its tokens; fractional where the mean is."""
    step = _step(schedule, rows)
    r = schedule.group
    place = data.draw(st.sampled_from([0.0, (r - 1) / 2, r - 1.0]))
    told = step.slot_positions(step.completed, place)
    for row, span in enumerate(step.completed):
        for index, slot in enumerate(span):
            own = [schedule.anchors + r * slot + n for n in range(r)]
            expected = {0.0: own[0], r - 1.0: own[-1]}.get(place, sum(own) / r)
            assert float(told[row, index]) == expected
    assert told.is_floating_point() == (place != int(place))


def _step(schedule: Schedule, rows: list[tuple[int, int]]) -> Step:
    new = max(1, *(count for _, count in rows))
    before, counts = [seen for seen, _ in rows], [count for _, count in rows]
    return Step(schedule, before, new, counts, folded=True, device=torch.device("cpu"))


def _alike(step: Step, rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The rows that a step tells apart: one where all are alike."""
    return rows[:1] if step.uniform else rows
