"""Where prompts' caches are kept between requests, as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class FoundPrefix:
    """The cache of a prompt's first `length` tokens, one row, for the finder to use and change."""

    cache: Any
    length: int


class PrefixStore(Protocol):
    """Caches of one model under one add-on (or none), by the tokens that they have seen.

    Called in the engine's thread, between steps of other requests: what takes long belongs into a
    thread of the store's own. block: prompts are read so that they can be kept after every
    multiple of so many tokens.
    """

    block: int

    def longest(self, tokens: Sequence[int]) -> FoundPrefix | None:
        """The cache of the longest kept prefix of these tokens, all of them at most; or None."""

    def put(self, tokens: Sequence[int], cache: Any) -> None:
        """Keep what is to be kept of a cache that has seen exactly these tokens.

        The cache goes on changing, so what is kept must be copied before this returns.
        """
