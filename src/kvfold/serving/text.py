"""From tokens to text that can be sent: whole characters, and nothing of a stop text.

A character may be split over tokens, and a stop text too. What might still become part of either
is held back until it is known not to, or until the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
LONGEST_PARTIAL = 3
"""Bytes of a UTF-8 character that can have come without the last of them."""
LONGEST_WAIT = 16
"""Tokens after which bytes that make no character are shown as they are."""


class Detokeniser:
    """Turns tokens that come one by one into text.

    Each call decodes only the tokens since the last whole character, together with those of the
    piece before: many tokenizers treat a token at the beginning of a text unlike one within it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.start = 0
        self.read = 0
        self.sent = ""

    def push(self, token: int) -> str:
        """Take a token; returns the text that is now certain and was not before."""
        self.tokens.append(token)
        fresh = self._fresh()
        if fresh is None:
            if len(self.tokens) - self.read < LONGEST_WAIT:
                return ""
            fresh = self._decode(self.tokens[self.read :])
        waiting = len(fresh) - len(fresh.rstrip(REPLACEMENT))
        unsure = min(waiting, LONGEST_PARTIAL)
        if unsure and len(self.tokens) - self.read < LONGEST_WAIT:
            return self._send(fresh[: len(fresh) - unsure])
        made = self._send(fresh)
        self.start, self.read, self.sent = self.read, len(self.tokens), ""
        return made

    def flush(self) -> str:
        """What was held back, at the end."""
        fresh = self._fresh()
        return "" if fresh is None else self._send(fresh)

    def _send(self, fresh: str) -> str:
        made = fresh[len(self.sent) :]
        self.sent = fresh if made else self.sent
        return made

    def _fresh(self) -> str | None:
        """Text of the tokens since `read`; None while it contradicts what was sent of it."""
        before = self._decode(self.tokens[self.start : self.read])
        whole = self._decode(self.tokens[self.start :])
        return whole[len(before) :] if whole.startswith(before + self.sent) else None

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StopFilter:
    """Lets text through up to the first of some stop texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take text; returns what can be no part of a stop text any more."""
        self.held += text
        found = [place for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            made, self.held = self.held[: min(found)], ""
            return made
        kept = max((overlap(self.held, stop) for stop in self.stops), default=0)
        made = self.held[: len(self.held) - kept]
        self.held = self.held[len(made) :]
        return made

    def flush(self) -> str:
        """What was held back, at the end."""
        made, self.held = self.held, ""
        return made


def overlap(text: str, beginning_of: str) -> int:
    """The most characters at the end of a text that another text begins with, but not all of it."""
    longest = min(len(text), len(beginning_of) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(beginning_of[:n])), 0)
