"""What the engine needs of rows, however they are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Rows(ABC):
    """Rows of one model that get one token each at a time. Places count from 0, without gaps.

    lengths: tokens that each row has seen.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lengths: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def join(self, cache: Any, length: int, copies: int) -> None:
        """Put `copies` rows behind the others, each like the one row of `cache`.

        length: the tokens that it has seen. The cache must not be used afterwards.
        """

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Feed each row one token; returns logits (rows, vocabulary)."""

    @abstractmethod
    def keep(self, places: Sequence[int]) -> None:
        """Let all rows go but these, which move up in this order."""

    @abstractmethod
    def cache_of(self, place: int) -> tuple[Any, list[int]]:
        """The cache that holds a row, and the tokens seen by each row that is in it."""

    @abstractmethod
    def caches(self) -> list[Any]:
        """The caches that hold the rows."""
