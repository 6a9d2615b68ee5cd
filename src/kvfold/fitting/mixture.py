"""Which rows of which texts each step of a training takes.

Every row follows from the seed, the step and its place in the step alone, so that a run that goes
on later, or another process, sees the same rows. Nothing is remembered from step to step.

Rows are numbered through all steps, `row number = step * rows + row`. Up to any number n, a part
of weight w has given `c` rows with `|c - n w| < 1`: parts take turns like tasks with deadlines
(the quota method of apportionment; scheduling theory calls it proportionate fairness). Within a
block of `BLOCK` rows the order of turns is then drawn, so that a part does not always meet what
else goes round with the steps, and the bound holds at the end of each block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.errors import CorpusError
from kvfold.fitting.checkpoint import job_digest
from kvfold.fitting.seeds import derived_seed, drawn_order

BLOCK = 32
"""Rows among which the order of turns is drawn."""

LONGEST_ROUND = 65536
"""Turns until all parts have had their exact shares. Weights that would need more are rounded to
whole turns of so many.
"""


class MixturePart(NamedTuple):
    """A text by name: windows, (windows, seq) int64, and its share of rows beside the others'."""

    name: str
    windows: Tensor
    weight: float


class Mixture:
    """Rows of several texts, each by its weight, the same for the same seed and step.

    parts: of different names and equal seq, weights above 0. Within a part every window comes
    once, in an order that the seed draws, before any comes again, in another order. Raises
    `CorpusError` for parts that are not so.
    """

    def __init__(self, parts: Sequence[MixturePart], seed: int) -> None:
        self.parts = tuple(MixturePart(*part) for part in parts)
        _check(self.parts)
        self.seed = seed
        self._shares = whole_weights([part.weight for part in self.parts])
        self._round = turns(self._shares)
        self._orders: dict[int, tuple[int, list[int]]] = {}

    @property
    def seq(self) -> int:
        """Tokens of a row."""
        return self.parts[0].windows.shape[1]

    def batch(self, step: int, rows: int) -> Tensor:
        """The rows of one step: (rows, seq) int64.

        step: from 0. rows: of every step; steps of another number of rows count on from another
        place. Of several processes, each takes its own of these rows. Raises `CorpusError` for a
        negative step or no rows.
        """
        if step < 0 or rows < 1:
            raise CorpusError(
                f"a step is at least 0 and has at least 1 row; got step {step} with {rows} rows"
            )
        first, stop = step * rows, (step + 1) * rows
        drawn = [
            turn
            for block in range(first // BLOCK, (stop - 1) // BLOCK + 1)
            for turn in self._turns(block)
        ]
        skipped = first // BLOCK * BLOCK
        return torch.stack(
            [self._window(*turn) for turn in drawn[first - skipped : stop - skipped]]
        )

    def shares(self, steps: int, rows: int) -> dict[str, int]:
        """How many rows each part gives, by name, in the first `steps` steps of `rows` rows."""
        block, rest = divmod(steps * rows, BLOCK)
        counts = self._given(block * BLOCK)
        for part, _ in self._turns(block)[:rest]:
            counts[part] += 1
        return {part.name: count for part, count in zip(self.parts, counts, strict=True)}

    def digest(self) -> str:
        """A digest of all that decides which rows come: what a checkpoint can be checked by."""
        digest = str(self.seed)
        for part, share in zip(self.parts, self._shares, strict=True):
            digest = job_digest(digest, part.name, str(share), tokens=part.windows)
        return digest

    def _given(self, count: int) -> list[int]:
        """Rows that each part has given when so many turns are over, in the undrawn order."""
        whole, rest = divmod(count, len(self._round))
        begun = self._round[:rest]
        return [whole * share + begun.count(part) for part, share in enumerate(self._shares)]

    def _turns(self, block: int) -> list[tuple[int, int]]:
        """Part, and how many rows it has given before, for each row of a block."""
        start = block * BLOCK
        given = self._given(start)
        drawn = []
        for place in drawn_order(BLOCK, derived_seed(self.seed, "turns", block)).tolist():
            part = self._round[(start + place) % len(self._round)]
            drawn.append((part, given[part]))
            given[part] += 1
        return drawn

    def _window(self, part: int, number: int) -> Tensor:
        """The window that a part gives as its row of this number."""
        name, windows, _ = self.parts[part]
        epoch, place = divmod(number, len(windows))
        known, order = self._orders.get(part, (-1, []))
        if known != epoch:
            seed = derived_seed(self.seed, "windows", name, epoch)
            order = drawn_order(len(windows), seed).tolist()
            self._orders[part] = epoch, order
        return windows[order[place]]


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers of a sum of at most `LONGEST_ROUND`, exact where that is enough."""
    exact = [Fraction(str(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    common = math.gcd(*whole)
    if sum(whole) // common <= LONGEST_ROUND:
        return [weight // common for weight in whole]
    return apportion(exact, LONGEST_ROUND)


def apportion(weights: Sequence[Fraction], total: int) -> list[int]:
    """Whole shares of `total` by weight, by largest remainder, and each at least 1.

    Raises `CorpusError` if there are more weights than `total`.
    """
    if total < len(weights):
        raise CorpusError(f"each of {len(weights)} parts must get at least 1; there are {total}")
    exact = [weight * total / sum(weights) for weight in weights]
    shares = [max(1, math.floor(share)) for share in exact]
    while sum(shares) < total:
        shares[max(range(len(shares)), key=lambda part: exact[part] - shares[part])] += 1
    while sum(shares) > total:
        larger = [part for part, share in enumerate(shares) if share > 1]
        shares[max(larger, key=lambda part: shares[part] - exact[part])] -= 1
    return shares


def turns(shares: Sequence[int]) -> list[int]:
    """The part of each of `sum(shares)` turns, none ever a whole turn from its exact share.

    A part may take its next turn as soon as it is due at all, and of those that may, the one
    whose turn must come soonest takes it.
    """
    total = sum(shares)
    given = [0] * len(shares)
    order = []
    for turn in range(1, total + 1):
        _, part = min(
            (-(-(given[part] + 1) * total // share), part)
            for part, share in enumerate(shares)
            if given[part] * total < turn * share
        )
        given[part] += 1
        order.append(part)
    return order


def _check(parts: Sequence[MixturePart]) -> None:
    if not parts:
        raise CorpusError("a mixture must have at least one part; got none; name a text")
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise CorpusError(f"the parts of a mixture must have different names; got {names}")
    for name, windows, weight in parts:
        if not (math.isfinite(weight) and weight > 0):
            raise CorpusError(
                f"a part's weight must be above 0 and finite; {name} has {weight}; leave the part "
                "out if it is to give nothing"
            )
        if windows.ndim != 2 or windows.numel() == 0 or windows.dtype != torch.int64:
            raise CorpusError(
                "a part must be at least one window of shape (windows, seq), int64; "
                f"{name} has {tuple(windows.shape)}, {windows.dtype}; give it a longer text"
            )
    lengths = {name: windows.shape[1] for name, windows, _ in parts}
    if len(set(lengths.values())) > 1:
        raise CorpusError(
            f"the windows of all parts must be equally long; got {lengths}; cut them alike"
        )
