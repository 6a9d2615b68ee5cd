"""All rows in one cache: a step of all of them is one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.runtime.feeding import last_logits
from kvfold.runtime.joining import join_rows, select_rows
from kvfold.serving.rows.base import Rows


class RowsTogether(Rows):
    """Rows of one cache, which grows when one joins and shrinks when one leaves."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.cache: Any = None

    def join(self, cache: Any, length: int, copies: int) -> None:
        """See `Rows`."""
        if copies > 1:
            select_rows(cache, [0] * copies, [length] * copies)
        if self.cache is None:
            self.cache = cache
        else:
            join_rows(self.cache, cache)
        self.lengths += [length] * copies

    def step(self, tokens: Sequence[int]) -> Tensor:
        """See `Rows`."""
        ids = torch.tensor(list(tokens))[:, None]
        logits = last_logits(self.model, ids, self.cache, self.lengths)
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def keep(self, places: Sequence[int]) -> None:
        """See `Rows`."""
        self.lengths = [self.lengths[place] for place in places]
        if places:
            select_rows(self.cache, list(places), self.lengths)
        else:
            self.cache = None

    def cache_of(self, place: int) -> tuple[Any, list[int]]:
        """See `Rows`."""
        return self.cache, self.lengths

    def caches(self) -> list[Any]:
        """See `Rows`."""
        return [] if self.cache is None else [self.cache]
