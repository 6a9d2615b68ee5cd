"""Every row in a cache of its own: a step of all of them is a forward for each.

For models whose rows can't share a cache, and the plain reference of those that do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.runtime.feeding import last_logits
from kvfold.serving.rows.base import Rows


class RowsApart(Rows):
    """Rows that know nothing of each other."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.held: list[Any] = []

    def join(self, cache: Any, length: int, copies: int) -> None:
        """See `Rows`."""
        self.held += [copy.deepcopy(cache) for _ in range(copies - 1)] + [cache]
        self.lengths += [length] * copies

    def step(self, tokens: Sequence[int]) -> Tensor:
        """See `Rows`."""
        logits = [
            last_logits(self.model, torch.tensor([[token]]), cache, [length])
            for token, cache, length in zip(tokens, self.held, self.lengths, strict=True)
        ]
        self.lengths = [length + 1 for length in self.lengths]
        return torch.cat(logits)

    def keep(self, places: Sequence[int]) -> None:
        """See `Rows`."""
        self.lengths = [self.lengths[place] for place in places]
        self.held = [self.held[place] for place in places]

    def cache_of(self, place: int) -> tuple[Any, list[int]]:
        """See `Rows`."""
        return self.held[place], [self.lengths[place]]

    def caches(self) -> list[Any]:
        """See `Rows`."""
        return self.held
