"""The integers of folding, against the definition applied token by token."""

from __future__ import annotations

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
    told = step.stored_positions(written=True).expand(len(rows), size)
    assert torch.equal(told, expected[:, 0, :, 0])


def _place(buffer: torch.Tensor, row: int, position: int, schedule: Schedule) -> None:
    a, ring = schedule.anchors, schedule.ring_size
    if position < a:
        buffer[row, 0, position] = position
    elif ring:
        buffer[row, 0, a + (position - a) % ring] = position
