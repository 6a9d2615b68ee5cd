"""One model that is served, under one add-on or none: its prompts and its running rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.anatomy import Anatomy, anatomy
from kvfold.errors import RequestError
from kvfold.runtime.cache import FoldedCache
from kvfold.runtime.feeding import last_logits
from kvfold.runtime.joining import is_joinable
from kvfold.runtime.ledger import Ledger, plain_bytes
from kvfold.serving.choice import Choice
from kvfold.serving.prefix import PrefixCaches
from kvfold.serving.request import Begun, CacheSize, Failed, Held, Request, Ticket
from kvfold.serving.rows import Rows, RowsApart, RowsTogether
from kvfold.store.prefix_store import resumes_as_cold

if TYPE_CHECKING:
    from kvfold.runtime.attach import Attachment

PREFILL_CHUNK = 128
"""Prompt tokens that are read between two steps of the running rows.

Nothing interrupts a forward, so this also bounds how long the row of a client that left can stay:
two CPU cores read about 235 tokens of SmolLM2 a second, and a row should be free within one.
"""

log = logging.getLogger(__name__)


@dataclass
class Reading:
    """A prompt that is being read: its cache has seen `done` of its tokens."""

    ticket: Ticket
    cache: Any
    done: int
    cached: int


@dataclass(frozen=True)
class LaneState:
    """A lane at one moment. rows: being generated. tokens: that they have seen.

    cache_bytes: of all rows' caches. plain_bytes: what the plain model's cache would hold of the
    same tokens.
    """

    rows: int
    tokens: int
    cache_bytes: int
    plain_bytes: int


@dataclass
class LaneSettings:
    """max_rows: generated at once. chunk: prompt tokens read at once. apart: never share a cache.

    context: the most tokens of prompt and answer together; None for what the model says.
    """

    max_rows: int = 16
    chunk: int = PREFILL_CHUNK
    apart: bool = False
    context: int | None = None


@dataclass
class Lane:
    """A served model.

    model: with `attachment` on it, or plain where that is None. store: of its prompts' prefixes;
    left unused where the plan reads a prompt in a way that chunks would change.
    """

    name: str
    model: Any
    tokenizer: Any
    attachment: Attachment | None = None
    store: PrefixCaches | None = None
    settings: LaneSettings = field(default_factory=LaneSettings)

    def __post_init__(self) -> None:
        self.anatomy: Anatomy = anatomy(self.model)
        self.ends = _end_tokens(self.model, self.tokenizer)
        self.context: int = self.settings.context or self.anatomy.max_positions or 2**31
        self.together = not self.settings.apart and self._rows_can_share()
        self.rows: Rows = self._no_rows()
        self.choices: list[Choice] = []
        self.reading: Reading | None = None

    def _rows_can_share(self) -> bool:
        """Not with layers of unknown kinds, or rotations that depend on the longest row."""
        return is_joinable(self.new_cache()) and self.anatomy.rope_is_static

    def _no_rows(self) -> Rows:
        return RowsTogether(self.model) if self.together else RowsApart(self.model)

    def new_cache(self) -> Any:
        """An empty cache of this model."""
        if self.attachment is None:
            return DynamicCache(config=self.model.config)
        return self.attachment.new_cache()

    @property
    def reads_in_chunks(self) -> bool:
        """Whether a prompt that is read piece by piece gives what it gives when read at once.

        So it is by the law of chunks for folded prompts. Where the prompt's own queries see all
        of it, or most of it skips layers, pieces would be another computation.
        """
        return self.attachment is None or resumes_as_cold(self.attachment.plan)

    def check(self, request: Request, source: str = "prompt") -> None:
        """Raise `RequestError` for a request that this lane can never run.

        source: the part of what a client sent that its tokens came from.
        """
        if request.choices > self.settings.max_rows:
            raise RequestError(
                f"at most {self.settings.max_rows} choices can be generated at once; got "
                f"{request.choices}; ask for fewer",
                param="n",
            )
        total = len(request.tokens) + request.max_tokens
        if total > self.context:
            raise RequestError(
                f"prompt and answer may have {self.context} tokens together; got a prompt of "
                f"{len(request.tokens)} and max_tokens={request.max_tokens}; shorten either",
                param=source,
                code="context_length_exceeded",
            )
        if max(request.tokens) >= self.anatomy.vocab_size or min(request.tokens) < 0:
            raise RequestError(
                f"token ids lie between 0 and {self.anatomy.vocab_size - 1}; got others",
                param=source,
            )

    def has_room_for(self, request: Request) -> bool:
        """Whether a request could begin now."""
        return self.reading is None and len(self.rows) + request.choices <= self.settings.max_rows

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.reading is None and not self.choices

    def begin(self, ticket: Ticket) -> None:
        """Start to read a prompt, from where a store has it."""
        self.reading = Reading(ticket, None, 0, 0)
        store = self._store_in_use
        found = None if store is None else store.longest(ticket.request.tokens)
        if found is None:
            self.reading.cache = self.new_cache()
        else:
            self.reading = Reading(ticket, found.cache, found.length, found.length)

    @property
    def _store_in_use(self) -> PrefixCaches | None:
        return self.store if self.reads_in_chunks else None

    def read_on(self) -> None:
        """Read the next chunk of the prompt; the last one lets its rows join the others."""
        reading = self.reading
        assert reading is not None
        request = reading.ticket.request
        stop = self._chunk_end(reading.done, len(request.tokens))
        ids = torch.tensor([request.tokens[reading.done : stop]])
        logits = last_logits(self.model, ids, reading.cache, [reading.done])
        reading.done = stop
        self._offer(reading)
        if stop == len(request.tokens):
            self._join(reading, logits)
            self.reading = None

    def _chunk_end(self, start: int, total: int) -> int:
        if not self.reads_in_chunks:
            return total
        stop = start + self.settings.chunk
        if self.store is not None:
            # The same borders whether the beginning was found or read, so the same rounding.
            block = self.store.block
            stop = min(stop, (start // block + 1) * block)
        return min(stop, total)

    def _offer(self, reading: Reading) -> None:
        store = self._store_in_use
        if store is not None and reading.done % store.block == 0:
            store.put(reading.ticket.request.tokens, reading.done, reading.cache)

    def warm_up(self) -> None:
        """Run a few tokens, so that the first request need not wait for what is made once."""
        cache = self.new_cache()
        last_logits(self.model, torch.zeros(1, 16, dtype=torch.long), cache, [0])
        last_logits(self.model, torch.zeros(1, 1, dtype=torch.long), cache, [16])

    def _join(self, reading: Reading, logits: Tensor) -> None:
        ticket = reading.ticket
        count = ticket.request.choices
        ticket.sink(Begun(reading.cached))
        if isinstance(reading.cache, FoldedCache):
            reading.cache.forget_spare_codes()  # only prompts are kept
        made = [Choice(ticket, index, self.tokenizer, self.ends) for index in range(count)]
        likeliest = int(logits[0].argmax())
        sized = partial(self._size, reading.cache, reading.done, [reading.done])
        for choice in made:
            self._tell(choice, logits[0], likeliest, sized)
        going_on = [choice for choice in made if choice.done is None]
        if going_on:
            self.rows.join(reading.cache, reading.done, len(going_on))
            self.choices += going_on

    def step(self) -> int:
        """One token more for every row; returns how many rows there were."""
        count = len(self.choices)
        logits = self.rows.step([choice.last for choice in self.choices])
        likeliest = logits.argmax(dim=-1).tolist()
        for place, choice in enumerate(self.choices):
            sized = partial(self._size_of_row, place)
            self._tell(choice, logits[place], likeliest[place], sized)
        self.drop_done()
        return count

    def _tell(
        self, choice: Choice, logits: Tensor, likeliest: int, sized: Callable[[], CacheSize]
    ) -> None:
        events = choice.take(logits, likeliest)
        if choice.size_is_due():
            choice.ticket.sink(Held(choice.index, sized()))
        for event in events:
            choice.ticket.sink(event)

    def _size_of_row(self, place: int) -> CacheSize:
        cache, lengths = self.rows.cache_of(place)
        return self._size(cache, self.rows.lengths[place], lengths)

    def _size(self, cache: Any, tokens: int, lengths: list[int]) -> CacheSize:
        """What a row takes of a cache: every tensor has one slice for each of its rows."""
        held, rows = self._held(cache), len(lengths)
        return CacheSize(
            tokens,
            held.total // rows,
            self._plain_bytes(tokens),
            {name: count // rows for name, count in held.components.items() if count},
            rows,
            max(lengths),
        )

    def _held(self, cache: Any) -> Ledger:
        """The bytes of a cache's storages."""
        if self.attachment is None:
            return Ledger.of_plain(cache)
        counted: Ledger = cache.nbytes()
        return counted

    def _plain_bytes(self, tokens: int) -> int:
        return plain_bytes(self.anatomy, tokens, element_size=self.model.dtype.itemsize).total

    def drop_done(self) -> None:
        """Let rows go that are complete or that nobody waits for any more."""
        kept = [
            place
            for place, choice in enumerate(self.choices)
            if choice.done is None and not choice.ticket.cancelled
        ]
        left = [choice.ticket for choice in self.choices if choice.ticket.cancelled]
        if len(kept) < len(self.choices):
            self.choices = [self.choices[place] for place in kept]
            self.rows.keep(kept)
        if self.reading is not None and self.reading.ticket.cancelled:
            left.append(self.reading.ticket)
            self.reading = None
        for ticket in dict.fromkeys(left):
            _log_freed(self.name, ticket)

    def fail(self, error: Exception) -> None:
        """Give everything up that is in the lane, and tell those who wait."""
        tickets = {id(choice.ticket): choice.ticket for choice in self.choices}
        if self.reading is not None:
            tickets[id(self.reading.ticket)] = self.reading.ticket
        self.rows, self.choices, self.reading = self._no_rows(), [], None
        for ticket in tickets.values():
            ticket.sink(Failed(error))

    def state(self) -> LaneState:
        """What the lane holds now."""
        lengths = list(self.rows.lengths)
        plain = sum(self._plain_bytes(length) for length in lengths)
        held = sum(self._held(cache).total for cache in self.rows.caches())
        return LaneState(len(lengths), sum(lengths), held, plain)


def _log_freed(lane: str, ticket: Ticket) -> None:
    assert ticket.cancelled_at is not None
    waited = round(time.monotonic() - ticket.cancelled_at, 4)
    fields = {"request": ticket.label, "model": lane, "seconds_after_leaving": waited}
    log.info("row freed", extra={"fields": fields})


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a text: the tokenizer's, and those of the generation settings."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = named if isinstance(named, list) else [named]
    return frozenset(n for n in [*found, tokenizer.eos_token_id] if isinstance(n, int))
