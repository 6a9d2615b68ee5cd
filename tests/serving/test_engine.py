"""Requests that run together answer as they would alone."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest

from kvfold.errors import EngineClosedError, QueueFullError, RequestError
from kvfold.serving.engine import Engine
from kvfold.serving.prefix import FoundPrefix
from kvfold.serving.request import Request, Sampling

GREEDY = Sampling(temperature=0)
KINDS = ["plain", "ced", "latent", "hybrid", "hybrid-ced"]


def request(model: str, length: int, max_tokens: int = 12, **keys: Any) -> Request:
    """A prompt of bytes that depends on its length."""
    tokens = tuple(5 + (7 * place + length) % 200 for place in range(length))
    return Request(model, tokens, max_tokens, **{"sampling": GREEDY, **keys})


@pytest.mark.parametrize("kind", KINDS)
def test_requests_together_answer_as_alone(kind: str, lane: Any, serving: Any) -> None:
    """16 clients of different lengths that join and leave a batch of 6 rows, in chunks of 8."""
    requests = [request(kind, 3 + 5 * n % 41, 2 + n % 6, top_logprobs=0) for n in range(16)]
    with Engine({kind: lane(kind, max_rows=1, apart=True)}) as engine:
        alone = [serving.ask(engine, wanted) for wanted in requests]
    together_lane = lane(kind, max_rows=6, chunk=8)
    assert together_lane.together
    waiters = [serving.Waiter() for _ in requests]
    with Engine({kind: together_lane}) as engine:
        for wanted, waiter in zip(requests, waiters, strict=True):
            engine.submit(wanted, waiter)
        together = [waiter.answer() for waiter in waiters]
    for ours, theirs, wanted in zip(together, alone, requests, strict=True):
        assert [s.token for s in ours.scores[0]] == [s.token for s in theirs.scores[0]]
        assert ours.text == theirs.text
        assert ours.ended == theirs.ended
        assert ours.ended[0].tokens <= wanted.max_tokens
    assert len({answer.text for answer in alone}) > 4


def test_choices_are_drawn_from_seeds_of_their_own(lane: Any, serving: Any) -> None:
    """Choice i of seed s is the only choice of seed s + i, whatever else is in the batch."""
    sampled = Sampling(temperature=1.5, top_p=0.9, seed=11)
    with Engine({"ced": lane("ced")}) as engine:
        waiter = serving.Waiter()
        engine.submit(request("ced", 30, 40), waiter)
        three = serving.ask(engine, request("ced", 9, sampling=sampled, choices=3))
        again = [
            serving.ask(
                engine, request("ced", 9, sampling=Sampling(temperature=1.5, top_p=0.9, seed=s))
            )
            for s in (11, 12, 13)
        ]
        waiter.answer()
    assert three.texts == [answer.text for answer in again]
    assert len(set(three.texts)) == 3


def test_two_lanes_run_side_by_side_on_the_same_weights(lane: Any, serving: Any) -> None:
    """The plain model answers as without the folded one beside it."""
    with Engine({"plain": lane("plain")}) as engine:
        alone = serving.ask(engine, request("plain", 20))
    with Engine({"plain": lane("plain"), "ced": lane("ced")}) as engine:
        waiters = [serving.Waiter() for _ in range(2)]
        for name, waiter in zip(("plain", "ced"), waiters, strict=True):
            engine.submit(request(name, 20), waiter)
        plain, folded = (waiter.answer() for waiter in waiters)
    assert plain.text == alone.text != folded.text


def test_a_full_queue_refuses(lane: Any, serving: Any) -> None:
    """One row, one place to wait."""
    with Engine({"ced": lane("ced", max_rows=1)}, queue=1) as engine:
        running, waiting = serving.Waiter(), serving.Waiter()
        first = engine.submit(request("ced", 5, 400), running)
        assert running.began.wait(30)
        second = engine.submit(request("ced", 5, 3), waiting)
        with pytest.raises(QueueFullError, match="at most 1"):
            engine.submit(request("ced", 5), serving.Waiter())
        engine.cancel(second)
        third = serving.Waiter()
        engine.submit(request("ced", 5, 3), third)
        engine.cancel(first)
        assert third.answer(5).reason == "length"
        assert not waiting.events


def test_cancelling_frees_the_row_within_a_second(lane: Any, serving: Any) -> None:
    """And what was not wanted any more says nothing more."""
    with Engine({"ced": lane("ced", max_rows=1)}) as engine:
        running = serving.Waiter()
        ticket = engine.submit(request("ced", 5, 450), running)
        assert running.began.wait(30)
        started = time.monotonic()
        engine.cancel(ticket)
        assert serving.ask(engine, request("ced", 5, 1)).reason == "length"
        assert time.monotonic() - started < 1
        assert not running.done.is_set()
        while engine.state().lanes["ced"].rows:
            assert time.monotonic() - started < 1
            time.sleep(0.01)


def test_closing_completes_what_is_here_and_refuses_more(lane: Any, serving: Any) -> None:
    """Running and waiting requests are answered; a new one is not."""
    engine = Engine({"ced": lane("ced", max_rows=1)})
    engine.start()
    waiters = [serving.Waiter() for _ in range(3)]
    for waiter in waiters:
        engine.submit(request("ced", 5, 20), waiter)
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._closing:
        time.sleep(0.001)
    with pytest.raises(EngineClosedError):
        engine.submit(request("ced", 5), serving.Waiter())
    assert [waiter.answer().ended[0].tokens for waiter in waiters] == [20] * 3
    closing.join(10)
    assert not closing.is_alive()


def test_closing_at_once_fails_what_is_not_done(lane: Any, serving: Any) -> None:
    """Nobody is left waiting for ever."""
    engine = Engine({"ced": lane("ced", max_rows=1)})
    engine.start()
    waiters = [serving.Waiter() for _ in range(2)]
    for waiter in waiters:
        engine.submit(request("ced", 5, 450), waiter)
    assert waiters[0].began.wait(30)
    assert not engine.close(drain_seconds=0)
    assert all(isinstance(w.answer(5).error, EngineClosedError) for w in waiters)


def test_closing_does_not_wait_for_ever_for_a_step(
    lane: Any, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller sees that the engine still runs, and must leave the lanes alone."""
    made, begun, go_on = lane("ced"), threading.Event(), threading.Event()
    step = made.step

    def slowly() -> int:
        begun.set()
        assert go_on.wait(30)
        return step()

    monkeypatch.setattr(made, "step", slowly)
    engine = Engine({"ced": made})
    engine.start()
    waiter = serving.Waiter()
    engine.submit(request("ced", 5, 9), waiter)
    assert begun.wait(30)
    assert not engine.close(drain_seconds=0, halt_seconds=0.1)
    assert engine.is_running
    go_on.set()
    engine.close(drain_seconds=0)
    assert not engine.is_running
    assert isinstance(waiter.answer(5).error, EngineClosedError)


def test_a_fault_in_a_step_is_told_and_the_lane_goes_on(
    lane: Any, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after running out of memory."""
    made = lane("ced")
    with Engine({"ced": made}) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(made, "step", lambda: 1 / 0)
            failed = serving.ask(engine, request("ced", 5))
        assert isinstance(failed.error, ZeroDivisionError)
        assert serving.ask(engine, request("ced", 5)).reason == "length"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (request("ced", 500, 100), "512 tokens together"),
        (request("ced", 5, choices=17), "at most 16 choices"),
        (Request("ced", (5, 261), 3), "between 0 and 260"),
        (request("other", 5), "no model 'other'"),
    ],
)
def test_what_can_never_run_is_refused_at_once(wanted: Request, said: str, lane: Any) -> None:
    """Before it takes a place in the queue."""
    engine = Engine({"ced": lane("ced")})
    with pytest.raises(RequestError, match=said):
        engine.submit(wanted, lambda event: None)


class KeptPrefixes:
    """A store in memory that keeps every block of every prompt."""

    block = 16

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], Any] = {}

    def longest(self, tokens: Any) -> FoundPrefix | None:
        for length in range((len(tokens) - 1) // self.block * self.block, 0, -self.block):
            if tuple(tokens[:length]) in self.kept:
                return FoundPrefix(copy.deepcopy(self.kept[tuple(tokens[:length])]), length)
        return None

    def put(self, prompt: Any, length: int, cache: Any) -> None:
        self.kept[tuple(prompt[:length])] = copy.deepcopy(cache)

    def close(self) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_found_in_a_store_is_answered_as_when_read(
    kind: str, lane: Any, serving: Any
) -> None:
    """The same scores to the last bit, and only the rest is read."""
    store = KeptPrefixes()
    wanted = request(kind, 48, top_logprobs=2)
    with Engine({kind: lane(kind, store=store)}) as engine:
        cold, warm = (serving.ask(engine, wanted) for _ in range(2))
        longer = Request(kind, (*wanted.tokens[:40], 9, 9), 3)
        grown = serving.ask(engine, longer)
    assert (cold.begun.cached_tokens, warm.begun.cached_tokens) == (0, 32)
    assert grown.begun.cached_tokens == 32
    assert warm.scores == cold.scores
    assert sorted(map(len, store.kept)) == [16, 32, 48]


def test_plans_that_chunks_would_change_read_prompts_at_once(lane: Any, serving: Any) -> None:
    """With exact prefill the prompt's own queries see all of it, so nothing is kept of a part."""
    exact = {"prefill_attention": "exact"}
    answers = []
    store = KeptPrefixes()
    for keys in ({"chunk": 8, "store": store}, {"chunk": 512}):
        with Engine({"ced": lane("ced", plan=exact, **keys)}) as engine:
            answers.append(serving.ask(engine, request("ced", 48, top_logprobs=0)))
    assert answers[0].scores == answers[1].scores
    assert not store.kept
