"""Shares of right answers, with what so few of them can tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

NORMAL_95 = 1.959964
"""Standard deviations of a normal distribution on each side that hold 95 of a hundred."""


def wilson(share: float, count: float) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927): near 0 and 1 it stays inside them.

    `(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`, z = 1.96. count: answers, above
    0; less than there are, and maybe a fraction, where they depend on each other.
    """
    p, n, z2 = share, count, NORMAL_95**2
    middle = p + z2 / (2 * n)
    reach = NORMAL_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low, high = ((middle + sign * reach) / (1 + z2 / n) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


@dataclass(frozen=True)
class Share:
    """How many of `count` answers were right."""

    right: int
    count: int

    @property
    def value(self) -> float | None:
        """right / count; None of no answers."""
        return self.right / self.count if self.count else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the share, see `wilson`; from 0 to 1 of no answers."""
        return wilson(self.right / self.count, self.count) if self.count else (0.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "right": self.right,
            "count": self.count,
            "share": self.value,
            "interval": list(self.interval),
        }
