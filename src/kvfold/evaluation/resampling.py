"""What a difference between few answers can tell: intervals from resampled items.

Bootstrap (Efron 1979): draw as many items as there are, with replacement, over and over, and look
where the figure lands. Subjects are compared on the same draws, item by item, which takes the
difficulty of items out of the difference. Everything is seeded, so equal answers give equal
intervals.

Few items vary less in their resamples than such items do: resamples spread by sqrt((n-1)/n) too
little, and by a normal distribution where Student's is due. Both are put right (Hesterberg 2015,
"What Teachers Should Know about the Bootstrap"): with 4 items an interval is 1.9 times as wide.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold.evaluation.share import NORMAL_95, wilson

RESAMPLES = 1000
FEWEST_DIFFERING = 6
"""Right or wrong answers that must differ before a difference is more than noise: with 5 that all
went one way, chance alone would do that in one of 16 cases (`2 * 0.5^5`), with 6 in one of 32."""

FEWEST_ITEMS = 3
"""Of numbers: two items that are alike by chance would seem to be certain."""

RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""Numbers that are closer are the same: rounding in another order moves single precision so far."""

STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160),
    *(2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056),
    *(2.052, 2.048, 2.045),
)
"""Standard errors on each side that hold 95 of a hundred, for 1 to 29 degrees of freedom."""

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

        Judgements of one item go together, so that they tell less than as many items would: their
        count is divided by the `design_effect`. If all are right, or none is, only items count.
        """
        share, count = self.value, float(self.weights.sum())
        if share in (0.0, 1.0):
            return wilson(share, int((self.weights > 0).sum()))
        return wilson(share, count / self.design_effect())

    def design_effect(self) -> float:
        """How many judgements tell as much as one that is independent, at least 1 (Kish 1965).

        The variance between items over that of independent answers, where sums are counts among
        weights. A single item counts as one; where all judgements are alike, each for itself.
        """
        share, count = self.value, float(self.weights.sum())
        used = self.weights > 0
        items = int(used.sum())
        if count == items or share in (0.0, 1.0):
            return 1.0
        if items == 1:
            return count
        off = self.sums[used] - share * self.weights[used]
        between = float((off**2).sum()) / count**2 * items / (items - 1)
        return max(1.0, between / (share * (1 - share) / count))


def draws(items: int, seed: int, name: str, resamples: int = RESAMPLES) -> Draws:
    """Items of every resample: (resamples, items). name: of what is resampled, as a second seed."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return generator.integers(0, items, size=(resamples, items))


def resampled_interval(
    values: Iterable[float],
    figure: float,
    items: int,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float] | None:
    """The middle 95% of resampled figures, widened around the figure for being of few items.

    items: that the figure was made of. bounds: what a figure of its kind can be. None where half of
    the figures or more could not be told, and for a single item, which tells nothing of how items
    vary.
    """
    every = np.asarray(list(values), dtype=np.float64)
    known = every[np.isfinite(every)]
    if 2 * len(known) <= len(every) or items < 2:
        return None
    wider = _student(items - 1) / NORMAL_95 * math.sqrt(items / (items - 1))
    low, high = np.percentile(known, [2.5, 97.5])
    wide = figure - wider * (figure - float(low)), figure + wider * (float(high) - figure)
    return max(wide[0], bounds[0]), min(wide[1], bounds[1])


def _student(freedom: int) -> float:
    if freedom <= len(STUDENT_95):
        return STUDENT_95[freedom - 1]
    return NORMAL_95 + (NORMAL_95**3 + NORMAL_95) / (4 * freedom)


def within_noise(interval: tuple[float, float] | None, changed: float | None) -> bool:
    """Whether a difference may be chance.

    changed: `changed_answers`; None where any number may come of an item.
    """
    if interval is None or (changed is not None and changed < FEWEST_DIFFERING):
        return True
    return interval[0] <= 0 <= interval[1]


def changed_answers(ours: Column, plain: Column) -> float:
    """How many right or wrong answers are others, counted as independent ones.

    An item's judgements only count together, and are divided by the design effect of the changes:
    where conversations change as a whole or not at all, 3 that did are no 15 answers.
    """
    changes = Column(np.abs(ours.sums - plain.sums), ours.weights)
    return float(changes.sums.sum()) / changes.design_effect()


def differing_items(ours: Column, plain: Column) -> int:
    """On how many items two columns differ by more than rounding."""
    apart = ~np.isclose(ours.sums, plain.sums, rtol=RELATIVE, atol=ABSOLUTE)
    return int((apart | (ours.weights != plain.weights)).sum())


def alike(ours: float | None, plain: float | None) -> bool:
    """Whether two numbers are the same but for rounding; None is like nothing but None."""
    if ours is None or plain is None:
        return ours is plain
    return math.isclose(ours, plain, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
