"""Clients of a server as people are: long and short, streaming or not, some gone before the end."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from serving_process import Kind, Server, words

TIMEOUT = 600
SHARED_PREFIXES = 4
NEAR_TIE = 0.02
"""Log probabilities closer than this may change places by the rounding of a larger batch."""


@dataclass(frozen=True)
class Asked:
    """A request that can be asked again and again. number: of its prompt."""

    number: int
    model: str
    prompt: str
    max_tokens: int

    def body(self, *, stream: bool) -> dict[str, Any]:
        """As JSON: greedy, with the scores of two tokens at each place."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "logprobs": 2,
            "stream": stream,
        }


def requests_of(kind: Kind, count: int, models: Sequence[str], longest_answer: int) -> list[Asked]:
    """Prompts of 8 words up to the kind's longest; every second one begins like others."""
    draw = random.Random(0)  # noqa: S311 - the same each time
    shared = [words(f"shared {n}", kind.longest * (n + 1) // 8) for n in range(SHARED_PREFIXES)]
    made = []
    for number in range(count):
        length = round(8 * (kind.longest / 16) ** draw.random())
        text = words(f"own {number}", length)
        if number % 2:
            text = f"{shared[number % (2 * SHARED_PREFIXES) // 2]} {text}"
        answer = draw.randint(1, longest_answer)
        made.append(Asked(number, models[number % len(models)], text, answer))
    return made


@dataclass
class Answer:
    """Tokens as text, and the two best scores at each place."""

    tokens: list[str] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    finished: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Take in a whole answer, or a piece of a stream."""
        scores = choice["logprobs"]
        if scores:
            self.tokens += scores["tokens"]
            self.top += scores["top_logprobs"] or []
        self.finished = choice["finish_reason"] or self.finished

    def difference(self, other: Answer) -> str | None:
        """None for the same tokens, `tie` where the first others were nearly as likely, else where.

        self: the reference.
        """
        if self.tokens == other.tokens and self.finished == other.finished:
            return None
        pairs = zip(self.tokens, other.tokens, strict=False)
        place = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            ordered = sorted(self.top[place].values(), reverse=True)
            if len(ordered) < 2 or ordered[0] - ordered[1] < NEAR_TIE:
                return "tie"
        return f"place {place}: {self.tokens[:8]} {self.finished}, {other.tokens[:8]}"


def ask(client: httpx.Client, url: str, asked: Asked, *, stream: bool) -> Answer:
    """A whole answer; raises `httpx.HTTPError`, or `ValueError` where it is not as it must be."""
    made, body = Answer(), asked.body(stream=stream)
    if not stream:
        got = client.post(url + "/v1/completions", json=body)
        if got.status_code != 200:
            raise ValueError(f"status {got.status_code}: {got.text[:200]}")
        made.add(got.json()["choices"][0])
    else:
        with client.stream("POST", url + "/v1/completions", json=body) as got:
            if got.status_code != 200:
                raise ValueError(f"status {got.status_code}: {got.read()[:200]!r}")
            last = ""
            for line in got.iter_lines():
                last = line or last
                if line.startswith("data: {"):
                    piece = json.loads(line.removeprefix("data: "))
                    if "error" in piece:
                        raise ValueError(f"error in a stream: {piece['error']}")
                    made.add(piece["choices"][0])
        if last != "data: [DONE]":
            raise ValueError(f"a stream ended with {last[:80]!r}")
    if made.finished is None or len(made.tokens) > asked.max_tokens:
        raise ValueError(f"finish_reason {made.finished}, {len(made.tokens)} tokens")
    return made


@dataclass
class Tally:
    """What clients saw. left: request names with when their client went away, since 1970."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, problem: str | None = None) -> None:
        """Count something, with the text of what is wrong."""
        with self.lock:
            self.counts[what] += 1
            if problem is not None and len(self.problems) < 20:
                self.problems.append(f"{what}: {problem}")


@dataclass
class Client:
    """One client after another on some servers, until told to stop.

    references: by prompt number, what is answered without a store; None checks no texts. leaving:
    the share of requests whose client goes before the end.
    """

    seed: int
    servers: Sequence[Server]
    requests: Sequence[Asked]
    tally: Tally
    stop: threading.Event
    references: dict[int, Answer] | None = None
    leaving: float = 0.15

    def run(self) -> None:
        """Ask until stopped."""
        draw = random.Random(self.seed)  # noqa: S311 - the same each time
        while not self.stop.is_set():
            server = self.servers[draw.randrange(len(self.servers))]
            if not server.up:
                self.stop.wait(0.2)
                continue
            kills = server.kills
            asked = self.requests[draw.randrange(len(self.requests))]
            stream = draw.random() < 0.5
            try:
                with httpx.Client(timeout=TIMEOUT) as http:
                    if draw.random() < self.leaving:
                        self._leave(http, server, asked, draw, stream=stream)
                    else:
                        self._check(asked, ask(http, server.url, asked, stream=stream))
            except httpx.TransportError as error:
                self._broken(server, kills, f"{type(error).__name__}: {error}")
            except ValueError as error:
                self.tally.note("errors", str(error))

    def _check(self, asked: Asked, answer: Answer) -> None:
        self.tally.note("answers")
        if self.references is None:
            return
        found = self.references[asked.number].difference(answer)
        if found is None:
            self.tally.note("same as without a store")
        elif found == "tie":
            self.tally.note("near ties")
        else:
            self.tally.note("wrong answers", f"prompt {asked.number}: {found}")

    def _leave(
        self, http: httpx.Client, server: Server, asked: Asked, draw: random.Random, *, stream: bool
    ) -> None:
        """Go away after some pieces, or after a while without any."""
        name = uuid.uuid4().hex
        headers = {"x-request-id": name}
        where, body = server.url + "/v1/completions", asked.body(stream=stream)
        self.tally.note("left early")
        if stream:
            with http.stream("POST", where, json=body, headers=headers) as got:
                lines = got.iter_lines()
                for _ in range(draw.randint(1, 12)):
                    next(lines, None)
                self.tally.left[name] = time.time()
            return
        try:
            patience = httpx.Timeout(TIMEOUT, read=draw.uniform(0.05, 2))
            http.post(where, json=body, headers=headers, timeout=patience)
        except httpx.ReadTimeout:
            self.tally.left[name] = time.time()

    def _broken(self, server: Server, kills: int, told: str) -> None:
        """A connection that a kill has cut is expected; any other is an error."""
        if server.kills != kills:
            self.tally.note("cut off by a kill")
        else:
            self.tally.note("errors", told)
