"""What the server tells of a row's cache is what is really allocated for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvfold.anatomy import anatomy
from kvfold.runtime.ledger import plain_bytes
from kvfold.serving import choice as choices
from kvfold.serving.engine import Engine
from kvfold.serving.request import Ended, Held, Piece, Request, Sampling

from ..storages import allocated

KINDS = ["plain", "ced", "latent", "hybrid", "hybrid-ced"]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}


class Witness:
    """A sink that looks at the engine's own caches at the moment when their size is told."""

    def __init__(self, waiter: Any, lane: Any) -> None:
        self.waiter = waiter
        self.lane = lane
        self.sizes: list[Any] = []

    def __call__(self, event: Any) -> None:
        if isinstance(event, Held):
            reading = self.lane.reading
            caches = self.lane.rows.caches() if reading is None else [reading.cache]
            self.sizes.append((event.size, [allocated(cache) for cache in caches]))
        self.waiter(event)


def asked(model: str, length: int, max_tokens: int, **keys: Any) -> Request:
    tokens = tuple(5 + (7 * place + length) % 200 for place in range(length))
    return Request(
        model, tokens, max_tokens, sampling=Sampling(temperature=0), tell_cache=True, **keys
    )


@pytest.fixture
def at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are told as often as can be."""
    monkeypatch.setattr(choices, "SIZE_SECONDS", 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("at_every_token")
def test_bytes_told_are_bytes_allocated(kind: str, lane: Any, serving: Any) -> None:
    made = lane(kind)
    witness = Witness(serving.Waiter(), made)
    with Engine({kind: made}) as engine:
        engine.submit(asked(kind, 21, 9), witness)
        witness.waiter.answer()
    assert [size.tokens for size, _ in witness.sizes] == list(range(21, 30))
    for size, (bytes_there,) in witness.sizes:
        assert size.bytes == bytes_there == sum(size.parts.values())
        assert (size.rows, size.longest) == (1, size.tokens)
        expected = plain_bytes(anatomy(made.model), size.tokens, element_size=4).total
        assert size.plain_bytes == expected
    last = witness.sizes[-1][0]
    if kind in ("plain", "hybrid"):
        assert last.bytes == last.plain_bytes
    else:
        assert last.bytes != last.plain_bytes


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", ["plain", "latent", "hybrid-ced"])
@pytest.mark.usefixtures("at_every_token")
def test_rows_of_one_cache_are_told_their_parts_of_it(
    kind: str, apart: bool, lane: Any, serving: Any
) -> None:
    """Three rows of unequal lengths: a shared cache has room for the longest in each."""
    made = lane(kind, apart=apart)
    witnesses = [Witness(serving.Waiter(), made) for _ in range(3)]
    with Engine({kind: made}) as engine:
        for witness, length in zip(witnesses, (40, 12, 25), strict=True):
            engine.submit(asked(kind, length, 12), witness)
        for witness in witnesses:
            witness.waiter.answer()
    together = [
        (size, there)
        for w in witnesses
        for size, there in w.sizes[1:]
        if size.longest > size.tokens
    ]
    assert bool(together) is not apart
    for size, there in together:
        assert size.bytes * size.rows == sum(there)
    for witness in witnesses if apart else ():
        for size, there in witness.sizes:
            assert size.rows == 1
            assert size.bytes in there


@pytest.mark.usefixtures("at_every_token")
def test_a_size_comes_with_the_first_token_and_before_the_end(lane: Any, serving: Any) -> None:
    waiter = serving.Waiter(2)
    with Engine({"ced": lane("ced")}) as engine:
        engine.submit(asked("ced", 9, 4, choices=2), waiter)
        waiter.answer()
    for index in (0, 1):
        kinds = [type(e) for e in waiter.events[1:] if e.choice == index]
        assert kinds[0] is Held
        assert kinds[-1] is Ended
        assert kinds.count(Held) == 4
        assert Piece in kinds


def test_sizes_are_counted_now_and_then_only(lane: Any, serving: Any) -> None:
    """The last is told whatever the time."""
    waiter = serving.Waiter()
    with Engine({"ced": lane("ced")}) as engine:
        engine.submit(asked("ced", 9, 200), waiter)
        waiter.answer()
    sizes = [event.size.tokens for event in waiter.events if isinstance(event, Held)]
    assert sizes[0] == 9
    assert sizes[-1] == 9 + waiter.events[-1].tokens - 1
    assert len(sizes) < 100


def test_who_does_not_ask_is_told_nothing(http: Any) -> None:
    """Answers keep OpenAI's shape."""
    body = {**CHAT, "model": "ced"}
    assert "kvfold_cache" not in http.post("/v1/chat/completions", json=body).text
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert streamed.endswith("data: [DONE]\n\n")
    assert "kvfold_cache" not in streamed


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_and_a_whole_answer_tell_the_same_last_size(http: Any, path: str) -> None:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    body = {**prompt, "model": "ced", "max_tokens": 3, "temperature": 0, "kvfold_cache": True}
    (whole,) = http.post(path, json=body).json()["choices"]
    lines = http.post(path, json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    told = [c["kvfold_cache"] for chunk in chunks for c in chunk["choices"] if "kvfold_cache" in c]
    assert told[-1] == whole["kvfold_cache"]
    assert told[-1]["bytes"] == sum(told[-1]["parts"].values())
    assert told[-1]["tokens"] > 3


def test_openais_client_reads_sizes_as_an_extra(client: Any) -> None:
    made = client.chat.completions.create(
        model="plain", **CHAT, n=2, extra_body={"kvfold_cache": True}
    )
    for choice in made.choices:
        size = choice.model_extra["kvfold_cache"]
        assert size["bytes"] == size["plain_bytes"] > 0


def test_the_state_of_a_plain_lane_counts_the_pads_of_shorter_rows(lane: Any, serving: Any) -> None:
    """As Prometheus reads it: real bytes beside those that the tokens alone would need."""
    made = lane("plain")
    states: list[Any] = []
    waiters = [serving.Waiter(), serving.Waiter()]

    def look(event: Any) -> None:
        if isinstance(event, Held) and len(made.rows) == 2:
            states.append((made.state(), sum(map(allocated, made.rows.caches()))))
        waiters[1](event)

    with Engine({"plain": made}) as engine:
        engine.submit(asked("plain", 40, 30), waiters[0])
        engine.submit(asked("plain", 10, 5), look)
        for waiter in waiters:
            waiter.answer()
    for state, there in states:
        assert state.cache_bytes == there > state.plain_bytes
    assert states
