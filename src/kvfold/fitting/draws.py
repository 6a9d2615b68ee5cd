"""What a training may be told of its steps, whatever it trains: rates, windows and seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvfold.errors import FitError

HIGHEST_RATE = 100.0
"""Rates are in units of how far a step may move a weight: any near this one is a slip."""
SEED_BITS = 40
"""Seeds are multiplied by numbers of steps, and the product must fit a generator's 64 bits."""


def check_draws(learning_rate: float, windows: Sequence[int], seed: int) -> None:
    """Raise `FitError` for a learning rate, window sizes or a seed that no step can have."""
    if not (math.isfinite(learning_rate) and 0 < learning_rate <= HIGHEST_RATE):
        raise FitError(
            f"a learning rate must be above 0 and at most {HIGHEST_RATE:g}; got {learning_rate}"
        )
    if any(window < 0 for window in windows):
        raise FitError(f"windows must be of at least 0 tokens; got {list(windows)}")
    if not 0 <= seed < 2**SEED_BITS:
        raise FitError(f"a seed must be from 0 to 2**{SEED_BITS} - 1; got {seed}")
