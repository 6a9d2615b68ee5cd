"""Between the engine's thread and the server's event loop: one answer on its way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial

from kvfold.serving.answers import Gathered, Tally
from kvfold.serving.asking import Asked
from kvfold.serving.engine import Engine
from kvfold.serving.request import Begun, Ended, Event, Failed, Held, Piece, Ticket

LOOK_SECONDS = 0.25
"""How often to look whether the client is still there while nothing comes."""


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


class AnswerFailedError(Exception):
    """The engine gave up on a request, and has logged why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Run:
    """The requests of one answer, from submission until all choices have ended.

    gone: tells whether the client has left. Use `events` in a `try` whose end calls `stop`.
    """

    def __init__(self, engine: Engine, asked: Asked, gone: Callable[[], Awaitable[bool]]) -> None:
        self.engine = engine
        self.gone = gone
        self.tally = Tally(prompt=sum(len(request.tokens) for request in asked.requests))
        self.began = time.perf_counter()
        self.first_piece: float | None = None
        self.queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        first, requests = 0, []
        for request in asked.requests:
            requests.append((request, partial(self._put, asyncio.get_running_loop(), first)))
            first += request.choices
        self.choices = first
        self.open = first
        self.tickets: list[Ticket] = engine.submit_all(requests)

    def _put(self, loop: asyncio.AbstractEventLoop, first: int, event: Event) -> None:
        """Called by the engine. A loop that has been closed waits for nothing."""
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self.queue.put_nowait, (first, event))

    async def events(self) -> AsyncIterator[tuple[int, Begun | Piece | Held | Ended]]:
        """Events with the number of their choice, of its first choice for `Begun`.

        Raises `ClientLeftError` or `AnswerFailedError`.
        """
        while self.open:
            first, event = await self._next()
            if isinstance(event, Failed):
                raise AnswerFailedError(event.error)
            self.tally.note(event)
            if isinstance(event, Begun):
                yield first, event
                continue
            if isinstance(event, Ended):
                self.open -= 1
            elif isinstance(event, Piece) and self.first_piece is None:
                self.first_piece = time.perf_counter()
            yield first + event.choice, event

    async def _next(self) -> tuple[int, Event]:
        while True:
            # Looked at with every event too: a busy stream never runs into the timeout.
            if await self.gone():
                raise ClientLeftError
            try:
                return await asyncio.wait_for(self.queue.get(), LOOK_SECONDS)
            except TimeoutError:
                continue

    async def gather(self) -> list[Gathered]:
        """Every choice, complete."""
        made = [Gathered() for _ in range(self.choices)]
        async for index, event in self.events():
            if not isinstance(event, Begun):
                made[index].note(event)
        return made

    def stop(self) -> None:
        """Let go of what still runs."""
        if self.open:
            for ticket in self.tickets:
                self.engine.cancel(ticket)
