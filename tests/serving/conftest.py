"""Tiny models with a tokenizer of bytes, as the engine and the server have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.methods import build_lora, build_pipelines, build_state_projector
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.runtime.sharing import sharing_weights
from kvfold.serving.engine import Engine
from kvfold.serving.lane import Lane, LaneSettings
from kvfold.serving.request import Begun, Ended, Event, Failed, Piece, Request

LATENT_POOL_BITS = {
    "anchors": 2,
    "window": 6,
    "depth": [{"method": "latent", "layers": [2, 3, 4, 5], "rank": 24}],
    "sequence": [{"method": "pool", "layers": [2, 3, 4, 5], "gate": "mean"}],
    "bits": [{"method": "turboquant", "layers": [2, 3, 4, 5], "key_bits": 8, "value_bits": 8}],
}
CED = {"anchors": 2, "window": 6, "depth": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}]}
CED_OF_HYBRID = {"anchors": 2, "window": 6, "depth": [{"method": "ced", "split": 3, "layers": [7]}]}


class RandomAddOn:
    """A plan with random weights: no fit, so that folding shows."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self.plan = plan
        self.pipelines = build_pipelines(plan, anatomy(model))
        self.state_projector = build_state_projector(plan, anatomy(model))
        self.lora = build_lora(plan, anatomy(model))
        generator = torch.Generator().manual_seed(0)
        for weight in self.pipelines.parameters():
            fan_in = weight.shape[-1] if weight.dim() > 1 else 4
            weight.data = torch.randn(weight.shape, generator=generator) / fan_in**0.5

    def check_base(self, model: Any) -> None:
        """Any model will do."""


class Answer:
    """What came of one request, put together again."""

    def __init__(self, events: list[Event], choices: int = 1) -> None:
        self.texts = [""] * choices
        self.scores: list[list[Any]] = [[] for _ in range(choices)]
        self.ended: dict[int, Ended] = {}
        self.begun: Begun | None = None
        self.error: Exception | None = None
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Piece):
            assert event.choice not in self.ended
            self.texts[event.choice] += event.text
            self.scores[event.choice] += event.scores
        elif isinstance(event, Ended):
            self.ended[event.choice] = event
        elif isinstance(event, Begun):
            self.begun = event
        elif isinstance(event, Failed):
            self.error = event.error

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def reason(self) -> str:
        return self.ended[0].reason


class Waiter:
    """A sink that collects events, and can be waited for."""

    def __init__(self, choices: int = 1) -> None:
        import threading

        self.events: list[Event] = []
        self.choices = choices
        self.done = threading.Event()
        self.began = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Piece):
            self.began.set()
        ended = sum(isinstance(held, Ended) for held in self.events)
        if isinstance(event, Failed) or ended == self.choices:
            self.done.set()

    def answer(self, seconds: float = 60) -> Answer:
        assert self.done.wait(seconds), f"no answer in {seconds} s: {self.events}"
        return Answer(self.events, self.choices)


def _ask(engine: Engine, request: Request) -> Answer:
    waiter = Waiter(request.choices)
    engine.submit(request, waiter)
    return waiter.answer()


@pytest.fixture(scope="session")
def serving() -> Any:
    """What tests of serving share."""
    from types import SimpleNamespace

    return SimpleNamespace(ask=_ask, Waiter=Waiter, RandomAddOn=RandomAddOn)


@pytest.fixture(scope="session")
def lane(tiny_model: Callable[..., Any], byte_tokenizer: Any) -> Iterator[Callable[..., Lane]]:
    """`lane(kind, **settings)`: plain, ced, latent, hybrid or hybrid-ced, a tiny model each."""
    models: dict[str, Any] = {}
    attachments: list[Any] = []
    plans = {"ced": CED, "latent": LATENT_POOL_BITS, "hybrid-ced": CED_OF_HYBRID}

    def make(
        kind: str, *, store: Any = None, plan: dict[str, Any] | None = None, **keys: Any
    ) -> Lane:
        family = "qwen3_5" if kind.startswith("hybrid") else "llama"
        if family not in models:
            models[family] = tiny_model(family, vocab_size=len(byte_tokenizer))
        model, attachment = sharing_weights(models[family]), None
        if kind in plans:
            made = Plan.from_dict({**plans[kind], **(plan or {})})
            attachment = attach(model, RandomAddOn(model, made))
            attachments.append(attachment)
        return Lane(kind, model, byte_tokenizer, attachment, store, LaneSettings(**keys))

    yield make
    for attachment in attachments:
        attachment.detach()
