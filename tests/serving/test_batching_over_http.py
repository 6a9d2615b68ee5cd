"""Clients that come and go share steps, and each gets what it would get alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

COMPLETIONS = "/v1/completions"
CLIENTS = 16
LOGPROBS_TOLERANCE = 5e-4
"""fp32; a row's products are rounded otherwise in a larger matrix."""


def asked(model: str, number: int) -> dict[str, Any]:
    """Prompts of 3 to 75 tokens, answers of 3 to 11 that no end token cuts short."""
    length = 3 + 13 * number % 73
    return {
        "model": model,
        "prompt": [5 + (7 * place + number) % 200 for place in range(length)],
        "max_tokens": 3 + 5 * number % 9,
        "temperature": 0,
        "logprobs": 0,
        "logit_bias": {"2": -100},
    }


def figure(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def whole(http: httpx.Client, wanted: dict[str, Any]) -> tuple[str, list[float]]:
    answer = http.post(COMPLETIONS, json=wanted)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def streamed(http: httpx.Client, wanted: dict[str, Any]) -> tuple[str, list[float]]:

    text, scores = "", []
    with http.stream("POST", COMPLETIONS, json={**wanted, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                scores += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    return text, scores


def leave(http: httpx.Client, wanted: dict[str, Any]) -> None:
    """Go away in the middle of an answer."""
    with http.stream("POST", COMPLETIONS, json={**wanted, "max_tokens": 200, "stream": True}) as it:
        next(it.iter_lines())


@pytest.mark.parametrize("kind", ["latent", "hybrid-ced"])
def test_clients_that_join_and_leave_get_what_they_get_alone(
    kind: str, lane: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    """16 at once on 6 rows, a third of which leave an earlier answer in the middle."""
    apart = serve({kind: lane(kind, max_rows=1, apart=True, chunk=16)})
    with httpx.Client(base_url=apart.url, timeout=60) as http:
        alone = [whole(http, asked(kind, number)) for number in range(CLIENTS)]
    together_lane = lane(kind, max_rows=6, chunk=16)
    assert together_lane.together
    together = serve({kind: together_lane})
    start = threading.Barrier(CLIENTS)

    def client(number: int) -> tuple[str, list[float]]:
        with httpx.Client(base_url=together.url, timeout=60) as http:
            start.wait()
            time.sleep(0.01 * (number % 5))
            if number % 3 == 2:
                leave(http, asked(kind, number))
            return (streamed if number % 2 else whole)(http, asked(kind, number))

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(client, range(CLIENTS)))
    for (text, scores), (own_text, own_scores) in zip(answers, alone, strict=True):
        assert text == own_text
        assert scores == pytest.approx(own_scores, abs=LOGPROBS_TOLERANCE)
    assert len({text for text, _ in alone}) > CLIENTS / 2
    with httpx.Client(base_url=together.url, timeout=60) as http:
        generated = figure(http, "kvfold_generated_tokens_total")
        assert figure(http, "kvfold_step_seconds_count") < 0.75 * generated, "rows ran one by one"
