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
"""Lengths of one kind that are tried for a page."""


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
    made = []
    for page_bytes in allowed:
        choices = [_lengths(size, page_bytes, unit) for size in sizes.values()]
        for lengths in itertools.product(*choices):
            made.append(Pages(page_bytes, dict(zip(sizes, lengths, strict=True))))
    assert made
    return min(made, key=lambda pages: _cost(pages, sizes, state_bytes))


def _lengths(size: RowSize, page_bytes: int, unit: int) -> tuple[int, ...]:
    """The longest blocks that fit on a page, and the roundest down to a part of it."""
    step = math.lcm(unit, size.tokens)
    most = int(page_bytes / size.bytes_per_token) // step
    least = max(1, -(-3 * most // 4) if size.grows else -(-most // 2))
    counts = range(most, least - 1, -1)
    round_ones = sorted(counts, key=lambda n: (-(n & -n), -n))[: CHOICES // 2]
    return tuple(step * n for n in dict.fromkeys((*counts[: CHOICES // 2], *round_ones)))


def _cost(pages: Pages, sizes: Mapping[str, RowSize], state_bytes: int) -> tuple[float, int]:
    period = math.lcm(*pages.tokens.values())
    wasted = pages.wasted_fraction(sizes)
    if state_bytes:
        wasted = max(wasted, 1 - state_bytes / pages.page_bytes)
    of_windows = pages.wasted_fraction(sizes, grows=False)
    return wasted + WINDOW_COST * of_windows + PERIOD_COST * period, pages.page_bytes
