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


class PrefixCaches(Protocol):
    """Caches of one model under one add-on (or none), by the tokens that they have seen.

    Called in the engine's thread, between steps of other requests: what takes long belongs into a
    thread of their own. block: prompts are read so that they can be kept after every multiple of
    so many tokens.
    """

    block: int

    def longest(self, prompt: Sequence[int]) -> FoundPrefix | None:
        """The longest kept prefix of a prompt that leaves one of its tokens or more; or None."""

    def put(self, prompt: Sequence[int], length: int, cache: Any) -> None:
        """Keep, if it is worth it, a cache that has seen the first `length` tokens of a prompt.

        The cache goes on changing, so what is kept must be copied before this returns.
        """

    def close(self) -> None:
        """Finish what is under way."""
