"""Which token is where: the integers of folding, apart from any tensor of a model.

With n seen tokens of a row, anchors A, window W and r tokens a slot, `b(n) = A + r * floor(max(0,
n - A - W) / r)`: anchors are [0, A), history is [A, b), the window is [b, n). A query at position
t has seen n = t + 1 tokens, its own included. Positions count a row's real tokens; pads have
none.

Slot g stands for tokens A + r*g .. A + r*g + r - 1. It is *made* when the last of them arrives and
*visible* to queries once all of them have left the window: `made(n) = floor(max(0, n - A) / r)`,
`slots(n) = (b(n) - A) / r`.

Where a prompt's tokens skip the upper layers (prefill skipping), those layers have exact keys from
some position p on only, anchors apart. What lies before p is visible as slots at once: all that
are made when the query at p runs, and the slot that p lies in as soon as its last token has come.

A layer's exact keys live in one buffer: the A anchors first, then a ring of R = W + r - 1 places
in which position p has place `A + (p - A) mod R`, then (where history is expanded) the slots in
order. Until the ring is full no place is used but the first n, so a long one is allocated as it
fills. `Step` works out, once per forward and for all layers of one group, what goes where.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

FIRST_PLACES = 256
"""Places that a ring begins with, where it will ever have as many; they double when full."""


@dataclass(frozen=True)
class Schedule:
    """anchors A, window W and group r (tokens a slot)."""

    anchors: int
    window: int
    group: int = 1

    @property
    def ring_size(self) -> int:
        """R: the most tokens that can be in the window at once."""
        return self.window + self.group - 1

    @property
    def exact_size(self) -> int:
        """Places for exact tokens: anchors and ring."""
        return self.anchors + self.ring_size

    def exact_places(self, seen: int) -> int:
        """Places allocated for exact tokens once the longest row has seen so many tokens."""
        return _allocated(seen, self.exact_size)

    def folded_until(self, seen: int) -> int:
        """b(n): positions below it (and from A on) are history."""
        return self.anchors + self.group * (max(0, seen - self.anchors - self.window) // self.group)

    def folded_until_each(self, seen: Tensor) -> Tensor:
        """b(n) elementwise."""
        beyond = (seen - self.anchors - self.window).clamp_min(0)
        return self.anchors + self.group * beyond.div(self.group, rounding_mode="floor")

    def slots(self, seen: int) -> int:
        """How many slots are visible after n seen tokens."""
        return (self.folded_until(seen) - self.anchors) // self.group

    def made(self, seen: int) -> int:
        """How many slots n seen tokens have made, visible or not."""
        return max(0, seen - self.anchors) // self.group

    def skipped_until(self, seen: int, exact_from: int) -> int:
        """What takes the place of b(n) where exact tokens begin at `exact_from` <= n, if larger."""
        whole = self.anchors + self.group * -(-max(0, exact_from - self.anchors) // self.group)
        return self.anchors + self.group * (max(0, min(seen, whole) - self.anchors) // self.group)

    def skipped_until_each(self, seen: Tensor, exact_from: Tensor) -> Tensor:
        """`skipped_until` elementwise."""
        a, group = self.anchors, self.group
        whole = a + group * (exact_from - a + group - 1).clamp_min(0).div(
            group, rounding_mode="floor"
        )
        beyond = (torch.minimum(seen, whole) - a).clamp_min(0)
        return a + group * beyond.div(group, rounding_mode="floor")

    @property
    def pending_size(self) -> int:
        """The most slots that are made but not visible yet."""
        return -(-self.window // self.group)

    def pending_places(self, seen: int) -> int:
        """Places allocated for those once the longest row has seen so many tokens."""
        return _allocated(self.made(seen), self.pending_size)


def _allocated(used: int, most: int) -> int:
    """Places of a ring of `most` in which so many have been used, the first ones first."""
    if used == 0:
        return 0
    places = FIRST_PLACES
    while places < used:
        places *= 2
    return min(places, most)


@dataclass(frozen=True)
class Skipped:
    """What prefill skipping has left of each row's earlier tokens, where a step begins.

    exact_from: position from which on tokens have exact keys, anchors apart (0: all have).
    shown: how many slots are visible.
    """

    exact_from: Sequence[int]
    shown: Sequence[int]

    @property
    def alike(self) -> bool:
        """Whether it is the same in every row."""
        return len(set(self.exact_from)) == len(set(self.shown)) == 1


@dataclass(frozen=True)
class Write:
    """Where values of a step go in a buffer: both (batch, heads, places, width).

    With rows=None all rows alike, source and target being slices or index vectors; else one
    entry of rows, source and target for each value that is written.
    """

    source: slice | Tensor
    target: slice | Tensor
    rows: Tensor | None = None

    def apply(self, buffer: Tensor, values: Tensor) -> None:
        """Copy the values into the buffer in place."""
        if self.rows is not None:
            buffer[self.rows, :, self.target] = values[self.rows, :, self.source]
        elif isinstance(self.target, slice):
            buffer[:, :, self.target] = values[:, :, self.source]
        else:
            buffer.index_copy_(2, self.target, values[:, :, self.source])


class Step:
    """One forward of `new` columns on a cache that has seen `before` tokens of each row.

    valid: (batch, new) bool, or None if every column is a token; pads must lie to the left.
    folded: whether queries see what a decode step at their place would (else the prompt's own
    exact keys). skipped: for layers that earlier tokens of the prompt have not run through.
    uniform: whether all rows are alike, so that row axes can have size 1.
    """

    def __init__(
        self,
        schedule: Schedule,
        before: Sequence[int],
        new: int,
        counts: Sequence[int],
        *,
        folded: bool,
        device: torch.device,
        skipped: Skipped | None = None,
    ) -> None:
        assert folded or skipped is None
        self.schedule = schedule
        self.skipped = skipped
        self.before = list(before)
        self.new = new
        self.after = [seen + count for seen, count in zip(before, counts, strict=True)]
        self.folded = folded
        self.device = device
        rows_alike = skipped is None or skipped.alike
        full = all(count == new for count in counts)
        self.uniform = rows_alike and full and len(set(self.before)) == 1
        self.rows = range(1) if self.uniform else range(len(self.before))
        self._remembered: dict[Hashable, Any] = {}

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once in a step: masks and writes are the same for all layers."""
        if key not in self._remembered:
            self._remembered[key] = make()
        made: T = self._remembered[key]
        return made

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self.device)

    @property
    def most_pads(self) -> int:
        """The most columns of this step that are no token of their row."""
        return max(self.new - self.after[row] + self.before[row] for row in self.rows)

    @cached_property
    def positions(self) -> Tensor:
        """Position of each column, (rows, new); below the row's first new position for pads."""
        last = self._tensor([self.after[row] for row in self.rows])
        columns = torch.arange(self.new, device=self.device)
        return last[:, None] - self.new + columns

    @cached_property
    def valid(self) -> Tensor:
        """Which columns are tokens, (rows, new)."""
        first = self._tensor([self.before[row] for row in self.rows])
        return self.positions >= first[:, None]

    @cached_property
    def horizon(self) -> Tensor:
        """For each query the position before which it sees slots, (rows, new): b(t + 1) or b(n)."""
        if self.folded:
            seen = self.positions + 1
            until = self.schedule.folded_until_each(seen)
            if self.skipped is None:
                return until
            return torch.maximum(until, self.schedule.skipped_until_each(seen, self._exact_from))
        starts = [self.schedule.folded_until(self.before[row]) for row in self.rows]
        return self._tensor(starts)[:, None].expand(-1, self.new)

    @cached_property
    def _exact_from(self) -> Tensor:
        assert self.skipped is not None
        return self._tensor([self.skipped.exact_from[row] for row in self.rows])[:, None]

    @cached_property
    def exact_horizon(self) -> Tensor:
        """For each query the first position that it sees exactly, anchors apart: (rows, new)."""
        if self.skipped is None:
            return self.horizon
        return torch.maximum(self.horizon, self._exact_from)

    def visible(self, row: int, seen: int) -> int:
        """How many slots a row's query sees that has seen so many tokens, its own included."""
        slots = self.schedule.slots(seen)
        if self.skipped is None:
            return slots
        until = self.schedule.skipped_until(seen, self.skipped.exact_from[row])
        return max(slots, (until - self.schedule.anchors) // self.schedule.group)

    def stored_positions(self, exact: int, *, written: bool) -> Tensor:
        """Position held by each exact place, -1 if none, (rows, exact).

        exact: how many are allocated. written: after this step's ring write, or before it.
        Anchors count as written.
        """
        a, ring = self.schedule.anchors, self.schedule.ring_size
        places = torch.arange(exact, device=self.device)
        after = self._tensor([self.after[row] for row in self.rows])[:, None]
        before = self._tensor([self.before[row] for row in self.rows])[:, None]
        newest = (after if written else before) - 1
        in_ring = newest - (newest - places) % ring if ring else places
        held = torch.where(places < a, places, in_ring)
        return torch.where((held < after) & ((places < a) | (held >= a)), held, -1)

    @cached_property
    def most_slots(self) -> int:
        """Slots that the last query of the longest row sees."""
        if self.folded:
            return max(self.visible(row, self.after[row]) for row in self.rows)
        return max(self.schedule.slots(self.before[row]) for row in self.rows)

    @cached_property
    def exact_places(self) -> int:
        """Exact places that a layer must have in this step."""
        return self.schedule.exact_places(max(self.after))

    @cached_property
    def exits(self) -> list[range]:
        """For each row the slots that become visible in this step."""
        shown = [
            self.schedule.slots(self.before[row])
            if self.skipped is None
            else self.skipped.shown[row]
            for row in self.rows
        ]
        return [range(shown[row], self.visible(row, self.after[row])) for row in self.rows]

    @cached_property
    def completed(self) -> list[range]:
        """For each row the slots that this step makes."""
        made = self.schedule.made
        return [range(made(self.before[row]), made(self.after[row])) for row in self.rows]

    def _column(self, row: int, position: int) -> int:
        return self.new - (self.after[row] - position)

    @cached_property
    def anchor_write(self) -> Write | None:
        """New tokens that are anchors."""
        spans = [
            range(self.before[row], min(self.after[row], self.schedule.anchors))
            for row in self.rows
        ]
        return self._write(spans, lambda p: p)

    @cached_property
    def ring_write(self) -> Write | None:
        """New tokens that stay exact after the step: the last R."""
        return self.token_write(self.schedule.ring_size, self.schedule.anchors)

    def token_write(self, size: int, offset: int = 0) -> Write | None:
        """The last `size` tokens beyond the anchors, to a ring that begins at `offset`."""
        if size == 0:
            return None
        a = self.schedule.anchors

        def make() -> Write | None:
            spans = [
                range(max(a, self.before[row], self.after[row] - size), self.after[row])
                for row in self.rows
            ]
            return self._write(spans, lambda p: offset + (p - a) % size)

        return self.remember(("token_write", size, offset), make)

    @cached_property
    def pending_write(self) -> Write | None:
        """The step's last completed slots, left-aligned, to a ring of `pending_size` places."""
        size = self.schedule.pending_size
        entries = [
            (row, slot - span.start, slot % size)
            for row, span in zip(self.rows, self.completed, strict=True)
            for slot in (range(max(span.start, span.stop - size), span.stop) if size else ())
        ]
        if not self.uniform or not entries:
            return self._indexed(entries)
        _, first, target = entries[0]
        if len(entries) == entries[-1][2] - target + 1:
            places: slice | Tensor = slice(target, target + len(entries))
        else:
            places = self._tensor([place for _, _, place in entries])
        return Write(slice(first, first + len(entries)), places)

    def slot_write(self, spans: list[range], offset: int) -> Write | None:
        """Slots of each row, left-aligned, to a buffer whose slots begin at `offset`.

        spans: `exits` or `completed`.
        """
        if self.uniform:
            span = spans[0]
            target = slice(offset + span.start, offset + span.stop)
            return Write(slice(0, len(span)), target) if span else None
        entries = [
            (row, index, offset + slot)
            for row, span in zip(self.rows, spans, strict=True)
            for index, slot in enumerate(span)
        ]
        return self._indexed(entries)

    def _write(self, spans: list[range], place: object) -> Write | None:
        assert callable(place)
        if self.uniform:
            span = spans[0]
            if not span:
                return None
            source = slice(self._column(0, span.start), self._column(0, span.stop))
            targets = [place(p) for p in span]
            if targets[-1] - targets[0] == len(targets) - 1:
                return Write(source, slice(targets[0], targets[-1] + 1))
            return Write(source, self._tensor(targets))
        entries = [
            (row, self._column(row, p), place(p))
            for row, span in zip(self.rows, spans, strict=True)
            for p in span
        ]
        return self._indexed(entries)

    def _indexed(self, entries: list[tuple[int, int, int]]) -> Write | None:
        if not entries:
            return None
        rows, source, target = (self._tensor(column) for column in zip(*entries, strict=True))
        return Write(source, target, rows)

    def slot_positions(self, spans: list[range], place: float) -> Tensor:
        """Position of each slot, (rows, most), where `place` is that among its own tokens.

        Rows with fewer slots run on. Float32 where positions are fractional.
        """
        first = [self.schedule.anchors + self.schedule.group * span.start for span in spans]
        most = max(len(span) for span in spans)
        offsets = self.schedule.group * torch.arange(most, device=self.device)
        positions = self._tensor(first)[:, None] + offsets
        return positions + (int(place) if place == int(place) else place)
