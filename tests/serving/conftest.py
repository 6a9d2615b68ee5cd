"""Tiny models with a tokenizer of bytes, as the engine and the server have them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
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

from ..openai_cases import CALL_TOKENS, successors
from ..openai_cases import SCRIPTS as OPENAI_SCRIPTS

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


START = "<answer>"
MARKUP = "<img src=x onerror=document.title=7>"
SCRIPTS = {**OPENAI_SCRIPTS, "markup": MARKUP}
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{% if m.content == 'fail' %}{{ raise_exception('no such talk') }}"
    "{% endif %}<user>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def _tokenizer_of_script(byte_tokenizer: Any) -> Any:
    """The tokenizer of bytes, with one token each for what would repeat a byte."""
    made = deepcopy(byte_tokenizer)
    made.add_tokens([*CALL_TOKENS, MARKUP])
    made.chat_template = TOOL_TEMPLATE
    return made


def _scripted(tokenizer: Any, script: str) -> Any:
    """A real model that says one text: each token's embedding leads to the token that follows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = len(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=size + size % 2, intermediate_size=8, head_dim=8,
            num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1,
            max_position_embeddings=256, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, model.config.hidden_size))
        model.lm_head.weight.zero_()
        for token, following in successors(tokenizer, START, script):
            model.lm_head.weight[following, token] = 1
    return model


@pytest.fixture(scope="session")
def scripted_lanes(byte_tokenizer: Any) -> dict[str, Lane]:
    """Lanes that say what is in `SCRIPTS`."""
    tokenizer = _tokenizer_of_script(byte_tokenizer)
    return {
        name: Lane(name, _scripted(tokenizer, said), tokenizer) for name, said in SCRIPTS.items()
    }


class LiveServer:
    """A server on a port of its own, in a thread."""

    def __init__(self, lanes: dict[str, Lane], *, queue: int = 64, **settings: Any) -> None:
        from kvfold.serving.app import ServerSettings, create_app
        from kvfold.serving.metrics import Metrics
        from kvfold.serving.server import make_server

        made = ServerSettings(**settings)
        metrics = Metrics()
        self.engine = Engine(lanes, queue=queue, listener=metrics)
        self.server = make_server(
            create_app(self.engine, made, metrics),
            self.engine,
            "127.0.0.1",
            0,
            made.drain_seconds,
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert self.thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.port}"

    def stop(self) -> None:
        """End it, once all answers are given."""
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Callable[..., LiveServer]]:
    """`serve(lanes, **settings)`: a live server until the end of the test."""
    started: list[LiveServer] = []

    def make(lanes: dict[str, Lane], **settings: Any) -> LiveServer:
        started.append(LiveServer(lanes, **settings))
        return started[-1]

    yield make
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def live(lane: Callable[..., Lane], scripted_lanes: dict[str, Lane]) -> Iterator[LiveServer]:
    """A server that the session's tests share."""
    server = LiveServer(
        {"plain": lane("plain"), "ced": lane("ced"), **scripted_lanes}, body_bytes=20_000
    )
    yield server
    server.stop()


@pytest.fixture
def http(live: LiveServer) -> Iterator[Any]:
    """A plain HTTP client of the shared server."""
    import httpx

    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(live: LiveServer) -> Iterator[Any]:
    """OpenAI's own client of the shared server."""
    import openai

    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
