"""What a difference between few answers can tell: intervals from resampled items.

Bootstrap (Efron 1979): draw as many items as there are, with replacement, over and over, and look
where the figure lands. Subjects are compared on the same draws, item by item, which takes the
difficulty of items out of the difference. Everything is seeded, so equal answers give equal
intervals.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.evaluation.share import wilson

RESAMPLES = 1000
FEWEST_DIFFERING = 6
"""Items that must differ before a difference is more than noise: with 5 that all went one way,
chance alone would do that in one of 16 cases (`2 * 0.5^5`), with 6 in one of 32."""

RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""Numbers that are closer are the same: rounding in another order moves single precision so far."""

Draws = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """One metric's scores, an entry for each item: `sum(sums) / sum(weights)` is the figure.

    sums, weights: (items,) float64. A weight is how many judgements an item had, 0 for an item
    that has no such metric.
    """

    sums: Values
    weights: Values

    @property
    def value(self) -> float:
        """The figure over all items."""
        return float(self.sums.sum() / self.weights.sum())

    def resampled(self, draws: Draws) -> Values:
        """The figure over each draw: (resamples,), NaN where a draw has no item with it."""
        weights = self.weights[draws].sum(axis=1)
        sums = self.sums[draws].sum(axis=1)
        found: Values = np.full(len(draws), np.nan)
        np.divide(sums, weights, out=found, where=weights > 0)
        return found

    def share_interval(self) -> tuple[float, float]:
        """The 95% interval of a share of right answers (`wilson`).

        Judgements of one item go together, so that they tell less than as many items would. The
        count is divided by the design effect (Kish 1965): the variance between items over that of
        independent answers, where that is above 1. If all are right, or none is, only items count.
        """
        share, count = self.value, float(self.weights.sum())
        used = self.weights > 0
        items = int(used.sum())
        if count == items:
            return wilson(share, count)
        if items == 1 or share in (0.0, 1.0):
            return wilson(share, items)
        off = self.sums[used] - share * self.weights[used]
        between = float((off**2).sum()) / count**2 * items / (items - 1)
        return wilson(share, count / max(1.0, between / (share * (1 - share) / count)))


def draws(items: int, seed: int, name: str, resamples: int = RESAMPLES) -> Draws:
    """Items of every resample: (resamples, items). name: of what is resampled, as a second seed."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return generator.integers(0, items, size=(resamples, items))


def percentile_interval(values: Iterable[float]) -> tuple[float, float] | None:
    """The middle 95% of resampled figures; None where half of them or more could not be told."""
    every = np.asarray(list(values), dtype=np.float64)
    known = every[np.isfinite(every)]
    if 2 * len(known) <= len(every):
        return None
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)


def within_noise(interval: tuple[float, float] | None, differing: int) -> bool:
    """Whether a difference may be chance. differing: items on which the two subjects differ."""
    if interval is None or differing < FEWEST_DIFFERING:
        return True
    return interval[0] <= 0 <= interval[1]


def differing_items(ours: Column, plain: Column) -> int:
    """On how many items two columns differ by more than rounding."""
    apart = ~np.isclose(ours.sums, plain.sums, rtol=RELATIVE, atol=ABSOLUTE)
    return int((apart | (ours.weights != plain.weights)).sum())


def alike(ours: Any, plain: Any) -> bool:
    """Whether plain data is the same but for the rounding of numbers."""
    if isinstance(ours, Mapping) and isinstance(plain, Mapping):
        return ours.keys() == plain.keys() and all(alike(ours[key], plain[key]) for key in ours)
    if isinstance(ours, (list, tuple)) and isinstance(plain, (list, tuple)):
        return len(ours) == len(plain) and all(map(alike, ours, plain))
    if isinstance(ours, float) and isinstance(plain, float):
        return math.isclose(ours, plain, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return bool(ours == plain)
