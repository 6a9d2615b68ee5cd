"""One continuation in the making: its sampler, its text, and when it is done."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor

from kvfold.serving.request import Ended, Event, FinishReason, Piece, Ticket, TokenScore
from kvfold.serving.sampling import Sampler, score
from kvfold.serving.text import Detokeniser, StopFilter

SIZE_SECONDS = 0.2
"""How often to tell what a row's cache takes, since counting takes a moment."""


class Choice:
    """One row's way from logits to events.

    ends: tokens that end a text. last: the token to feed next. done: why it ended, None before.
    """

    def __init__(self, ticket: Ticket, index: int, tokenizer: Any, ends: frozenset[int]) -> None:
        self.ticket = ticket
        self.index = index
        self.ends = ends
        self.sampler = Sampler(ticket.request.sampling, index)
        self.detokeniser = Detokeniser(tokenizer)
        self.stops = StopFilter(ticket.request.stop)
        self.last = -1
        self.tokens = 0
        self.done: FinishReason | None = None
        self._sized_at = -math.inf
        self._scores: list[TokenScore] = []
        self._made = 0
        self._shown = 0

    def take(self, logits: Tensor, likeliest: int) -> list[Event]:
        """Choose a token by logits (vocabulary,) and return what there is to tell.

        likeliest: the argmax, which all rows have found at once.
        """
        greedy = self.sampler.is_greedy
        self.last = likeliest if greedy else self.sampler.pick(logits)
        self.sampler.note(self.last)
        self.tokens += 1
        if self.last in self.ends:
            return self._end("stop")
        self._keep_score(logits)
        text = self._through_stops(self.detokeniser.push(self.last))
        if self.stops.stopped:
            return self._end("stop", text)
        if self.tokens == self.ticket.request.max_tokens:
            return self._end("length", text)
        return [self._piece(text)] if text else []

    def size_is_due(self) -> bool:
        """Whether it is to be told now what the row's cache takes, which this notes as done."""
        if not self.ticket.request.tell_cache:
            return False
        now = time.monotonic()
        due = self.done is not None or now - self._sized_at >= SIZE_SECONDS
        if due:
            self._sized_at = now
        return due

    def _keep_score(self, logits: Tensor) -> None:
        top = self.ticket.request.top_logprobs
        if top is not None:
            logprob, likeliest = score(logits, self.last, top)
            self._scores.append(TokenScore(self.last, logprob, likeliest, self._made))

    def _through_stops(self, text: str) -> str:
        self._made += len(text)
        return self.stops.push(text)

    def _end(self, reason: FinishReason, text: str = "") -> list[Event]:
        """Tell what was held back, but for what comes after a stop text, and that this is all."""
        if not self.stops.stopped:
            text += self._through_stops(self.detokeniser.flush())
        if self.stops.stopped:
            reason = "stop"
            shown = self._shown + len(text)
            self._scores = [kept for kept in self._scores if kept.offset < shown]
        else:
            text += self.stops.flush()
        self.done = reason
        ended = Ended(self.index, reason, self.tokens)
        return [self._piece(text), ended] if text or self._scores else [ended]

    def _piece(self, text: str) -> Piece:
        self._shown += len(text)
        scores, self._scores = tuple(self._scores), []
        return Piece(self.index, text, scores)
