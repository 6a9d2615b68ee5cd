"""Continuous batching: one thread that reads prompts and steps rows, whoever they belong to.

Each turn of its loop lets rows go that nobody wants, lets waiting requests begin where there is
room, reads one chunk of one prompt, and steps the rows of every lane once. So a long prompt holds
up running rows by one chunk at a time, and a request that comes waits for rows, not for others to
be done. The engine knows nothing of HTTP, and the threads that ask it touch no tensor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvfold.errors import EngineClosedError, QueueFullError, RequestError
from kvfold.serving.lane import Lane, LaneState
from kvfold.serving.request import Failed, Request, Sink, Ticket

STATE_SECONDS = 0.5
"""How old the reported state of running lanes may be."""
HALT_SECONDS = 10.0
"""How long to wait for the work that is under way once the engine is halted: a chunk or a step."""

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Told of the engine's work, in its thread; must return at once."""

    def prompt_read(self, lane: str, tokens: int, cached: int, choices: int) -> None:
        """A prompt was read, `cached` of its tokens from a store; every choice has got a token."""

    def stepped(self, lane: str, rows: int, seconds: float) -> None:
        """Every row got a token."""


class Silence:
    """A listener that nobody hears."""

    def prompt_read(self, lane: str, tokens: int, cached: int, choices: int) -> None:
        """See `Listener`."""

    def stepped(self, lane: str, rows: int, seconds: float) -> None:
        """See `Listener`."""


@dataclass(frozen=True)
class EngineState:
    """waiting: requests in the queue. lanes: each one's state, by name."""

    waiting: int
    lanes: Mapping[str, LaneState]


class Engine:
    """Runs requests on lanes.

    queue: how many requests may wait. Use as a context manager, or call `start` and `close`.
    """

    def __init__(
        self, lanes: Mapping[str, Lane], *, queue: int = 64, listener: Listener | None = None
    ) -> None:
        self.lanes = dict(lanes)
        self.queue = queue
        self.listener = listener or Silence()
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._halt = False
        self._turn_of = 0
        self._states: dict[str, LaneState] = {n: lane.state() for n, lane in self.lanes.items()}
        self._states_at = 0.0
        self._thread = threading.Thread(target=self._run, name="kvfold-engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain_seconds=0)

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Queue a request; its events go to `sink`, the last being `Failed` or every `Ended`.

        Raises `RequestError` for one that can never run, `QueueFullError`, `EngineClosedError`.
        """
        return self.submit_all([(request, sink)])[0]

    def submit_all(self, requests: Sequence[tuple[Request, Sink]], label: str = "") -> list[Ticket]:
        """Queue several requests, or none of them; see `submit`. label: what logs call them."""
        for request, _ in requests:
            self._lane(request).check(request)
        tickets = [Ticket(request, sink, label) for request, sink in requests]
        with self._changed:
            if not self.is_open:
                raise EngineClosedError("the engine is shutting down; ask another server")
            if len(self._waiting) + len(tickets) > self.queue and self._is_busy(tickets):
                raise QueueFullError(
                    f"at most {self.queue} requests may wait, and {len(self._waiting)} do; try "
                    "again in a moment"
                )
            self._waiting += tickets
            self._changed.notify_all()
        return tickets

    def _lane(self, request: Request) -> Lane:
        if request.model not in self.lanes:
            known = ", ".join(self.lanes)
            raise RequestError(f"there is no model {request.model!r} here; there are: {known}")
        return self.lanes[request.model]

    def _is_busy(self, tickets: list[Ticket]) -> bool:
        """Whether requests would have to wait: a queue of 0 takes what can begin at once."""
        alone = len(tickets) == 1 and not self._waiting
        return not (alone and self._lane(tickets[0].request).has_room_for(tickets[0].request))

    def cancel(self, ticket: Ticket) -> None:
        """Nobody wants the answer any more; no event follows once the present turn has ended."""
        with self._changed:
            ticket.cancel()
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing

    def state(self) -> EngineState:
        """What waits and runs, at most half a second old."""
        return EngineState(len(self._waiting), dict(self._states))

    @property
    def is_running(self) -> bool:
        """Whether its thread is there, and may use the lanes."""
        return self._thread.is_alive()

    def close(self, drain_seconds: float = 30.0, halt_seconds: float = HALT_SECONDS) -> bool:
        """Take no more requests, complete those that are here, and end.

        What is not done after `drain_seconds` fails with `EngineClosedError`, once the chunk or
        step that is under way has ended; that is waited for `halt_seconds`, and may leave the
        engine running (`is_running`). May be called again while another call waits, to drain no
        longer. Returns whether all was completed.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not self._thread.is_alive():
            return True
        self._thread.join(drain_seconds)
        drained = not self._thread.is_alive()
        with self._changed:
            self._halt = True
            self._changed.notify_all()
        self._thread.join(halt_seconds)
        return drained

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._is_idle() and not self._closing:
                    self._changed.wait()
                if self._halt or (self._closing and self._is_idle()):
                    break
            self._turn()
        self._give_up(EngineClosedError("the server shut down before this request was complete"))

    def _is_idle(self) -> bool:
        return not self._waiting and all(lane.is_idle for lane in self.lanes.values())

    def _turn(self) -> None:
        for lane in self.lanes.values():
            lane.drop_done()
        self._admit()
        self._read()
        for name, lane in self.lanes.items():
            lane.drop_done()  # whoever left while a prompt was read need not be stepped
            if lane.choices:
                self._step(name, lane)
        self._note_states()

    def _admit(self) -> None:
        """Let requests begin in the order they came; one without room holds up only its lane."""
        chosen: dict[str, Ticket] = {}
        with self._changed:
            seen: set[str] = set()
            for ticket in list(self._waiting):
                name = ticket.request.model
                if name not in seen and self.lanes[name].has_room_for(ticket.request):
                    chosen[name] = ticket
                    self._waiting.remove(ticket)
                seen.add(name)
        for name, ticket in chosen.items():
            self._guarded(self.lanes[name], partial(self.lanes[name].begin, ticket))

    def _read(self) -> None:
        """One chunk of one prompt, the lanes taking turns."""
        names = [name for name, lane in self.lanes.items() if lane.reading is not None]
        if not names:
            return
        self._turn_of += 1
        name = names[self._turn_of % len(names)]
        lane = self.lanes[name]
        reading = lane.reading
        assert reading is not None
        self._guarded(lane, lane.read_on)
        request = reading.ticket.request
        if lane.reading is None and reading.done == len(request.tokens):
            self.listener.prompt_read(name, reading.done, reading.cached, request.choices)

    def _step(self, name: str, lane: Lane) -> None:
        started, rows = time.perf_counter(), len(lane.choices)
        if self._guarded(lane, lane.step):
            self.listener.stepped(name, rows, time.perf_counter() - started)

    def _guarded(self, lane: Lane, work: Callable[[], object]) -> bool:
        """Do something; a fault costs what is in the lane, and not the engine."""
        try:
            work()
        except Exception as error:  # whatever it is, those who wait must be told
            log.exception("lane %s failed", lane.name)
            lane.fail(error)
            return False
        return True

    def _note_states(self) -> None:
        now = time.monotonic()
        settled = self._is_idle()
        if settled or now - self._states_at > STATE_SECONDS:
            self._states = {name: lane.state() for name, lane in self.lanes.items()}
            self._states_at = now

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
        for ticket in waiting:
            ticket.sink(Failed(error))
        for lane in self.lanes.values():
            lane.fail(error)
