"""How many tokens of each kind of row go on a page, so that pages are alike and little is wasted.

vLLM's pool has pages of one size. Rows of exact keys and values, of codes and of packed codes
differ in width by factors that are no whole numbers, so each kind gets a block of its own length.
A block is a whole number of slots; all are multiples of `UNIT`, so that prompts which share a
beginning can share blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

UNIT = 16
"""Tokens that every block is a multiple of."""
WIDEST_UNITS = 4
"""Blocks of the widest kind have at most so many units: larger ones are left half empty more."""
WINDOW_COST = 0.2
"""What waste of rows that only the last tokens have counts, against rows of all."""
PERIOD_COST = 1 / 5_000
"""Prompts share blocks up to a multiple of all blocks' lengths. A token more of that period is
worth so much of a page.
"""
CHOICES = 8
"""Lengths of one kind that are tried for a page, at most."""
COMBINATIONS = 40_000
"""Of all kinds' lengths that are tried for a page: with six kinds or more each has fewer."""


@dataclass(frozen=True)
class RowSize:
    """One kind of row: its bytes, and how many tokens it stands for.

    grows: whether all tokens have one, and not only the last.
    """

    row_bytes: int
    tokens: int = 1
    grows: bool = True

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one token costs."""
        return Fraction(self.row_bytes, self.tokens)


@dataclass(frozen=True)
class Pages:
    """page_bytes: of every page. tokens: of each kind's block, by name."""

    page_bytes: int
    tokens: Mapping[str, int]

    def wasted_fraction(self, sizes: Mapping[str, RowSize], *, grows: bool = True) -> float:
        """The largest part of a page that some kind leaves empty: of those of which all tokens
        have rows, or of the others."""
        used = [
            self.tokens[name] * size.bytes_per_token
            for name, size in sizes.items()
            if size.grows == grows
        ]
        return float(1 - min(used, default=Fraction(self.page_bytes)) / self.page_bytes)


def fit_pages(sizes: Mapping[str, RowSize], *, state_bytes: int = 0, unit: int = UNIT) -> Pages:
    """The pages that waste little and let prompts share blocks often.

    sizes: of each kind of row, by name. state_bytes: of a recurrent state, which has a page of its
    own; 0 where there are none. unit: tokens that every block is a multiple of.
    """
    widest = max(sizes, key=lambda name: sizes[name].bytes_per_token)
    step = math.lcm(unit, sizes[widest].tokens)
    least = int(step * sizes[widest].bytes_per_token)
    allowed = [units * least for units in range(1, WIDEST_UNITS + 1)]
    if state_bytes >= least:
        allowed = [state_bytes, *(size for size in allowed if size > state_bytes)]
    found = [_cheapest(page_bytes, sizes, state_bytes, unit) for page_bytes in allowed]
    best = min(page for page in found if page is not None)
    return Pages(best.page_bytes, dict(zip(sizes, best.tokens, strict=True)))


class _Length(NamedTuple):
    """A block's tokens, and the part of a page that it wastes: of a kind that all tokens have rows
    of, or that the last ones have."""

    tokens: int
    of_all: float
    of_windows: float


class _Page(NamedTuple):
    """What a page costs, its bytes, and the tokens of its blocks."""

    cost: float
    page_bytes: int
    tokens: tuple[int, ...]


def _cheapest(
    page_bytes: int, sizes: Mapping[str, RowSize], state_bytes: int, unit: int
) -> _Page | None:
    """The best blocks for pages of this size; None where rows of some kind don't fit on them."""
    each = min(CHOICES, max(2, int(COMBINATIONS ** (1 / len(sizes)))))
    choices = [_lengths(size, page_bytes, unit, each) for size in sizes.values()]
    least = 1 - state_bytes / page_bytes if state_bytes else 0.0
    best: _Page | None = None
    for chosen in itertools.product(*choices):
        tokens, of_all, of_windows = zip(*chosen, strict=True)
        wasted = max(least, *of_all) + WINDOW_COST * max(of_windows)
        cost = wasted + PERIOD_COST * math.lcm(*tokens)
        if best is None or cost < best.cost:
            best = _Page(cost, page_bytes, tokens)
    return best


def _lengths(size: RowSize, page_bytes: int, unit: int, count: int) -> list[_Length]:
    """The longest blocks that fit on a page, and the roundest down to a part of it; `count`."""
    step = math.lcm(unit, size.tokens)
    most = int(page_bytes / size.bytes_per_token) // step
    least = max(1, -(-3 * most // 4) if size.grows else -(-most // 2))
    counts = range(most, least - 1, -1)
    round_ones = sorted(counts, key=lambda n: (-(n & -n), -n))[: count // 2]
    made = []
    for tokens in dict.fromkeys(step * n for n in (*counts[: count - count // 2], *round_ones)):
        wasted = float(1 - tokens * size.bytes_per_token / page_bytes)
        made.append(_Length(tokens, *((wasted, 0.0) if size.grows else (0.0, wasted))))
    return made
