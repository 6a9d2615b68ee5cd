"""The HTTP server: OpenAI's API over the engine, and the page that shows it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from kvfold import __version__
from kvfold.errors import EngineClosedError, QueueFullError, RequestError
from kvfold.serving.answers import ChatForm, CompletionForm
from kvfold.serving.asking import Limits, ask_chat, ask_completion
from kvfold.serving.completing import Completions, nobody_waits
from kvfold.serving.engine import Engine
from kvfold.serving.faults import (
    Fault,
    of_error,
    of_status,
    of_validation,
    unknown_model,
)
from kvfold.serving.gates import AccessLog, HeadGate, KeyGate, SizeGate
from kvfold.serving.lane import Lane
from kvfold.serving.metrics import Metrics
from kvfold.serving.page import PAGE_FILES, add_page
from kvfold.serving.running import AnswerFailedError, ClientLeftError
from kvfold.serving.schema import ChatRequest, CompletionRequest, ErrorBody

FAULT_ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 500, 503)
}


@dataclass(frozen=True)
class ServerSettings:
    """keys: one of which every request must bring, none for an open server. cors: origins whose
    pages may ask. body_bytes: the largest body. drain_seconds: how long a shutdown waits."""

    keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    body_bytes: int = 4 * 2**20
    drain_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)


class ModelNotServedError(Exception):
    """There is no lane of this name."""


def create_app(engine: Engine, settings: ServerSettings, metrics: Metrics) -> FastAPI:
    """The application. It starts the engine, and closes it when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await run_in_threadpool(engine.close, settings.drain_seconds)

    # Its pages of documentation would load scripts from elsewhere; the schema itself is served.
    app = FastAPI(
        title="kvfold", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    metrics.watch(engine)
    _add_faults(app, engine)
    _add_models(app, engine)
    _add_completions(app, Completions(engine, settings.limits, metrics))
    _add_watching(app, engine, metrics)
    add_page(app)
    app.add_middleware(HeadGate)
    app.add_middleware(SizeGate, most=settings.body_bytes)
    if settings.keys:
        open_paths = frozenset(("/health", *PAGE_FILES))
        app.add_middleware(KeyGate, keys=settings.keys, open_paths=open_paths)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(AccessLog, metrics=metrics)
    return app


def _answer(fault: Fault) -> Response:
    # Encoded as ASCII: what is told of a request may hold text that no encoding takes.
    return Response(fault.encoded(), fault.status, fault.headers(), media_type="application/json")


def _add_faults(app: FastAPI, engine: Engine) -> None:
    """Every fault in one shape."""

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, error: RequestValidationError) -> Response:
        content_type = http.headers.get("content-type")
        return _answer(of_validation(list(error.errors()), await http.body(), content_type))

    @app.exception_handler(HTTPException)
    async def refused(_: HttpRequest, error: HTTPException) -> Response:
        return _answer(of_status(error.status_code, str(error.detail)))

    @app.exception_handler(ModelNotServedError)
    async def unknown(_: HttpRequest, error: ModelNotServedError) -> Response:
        return _answer(unknown_model(str(error), list(engine.lanes)))

    @app.exception_handler(ClientLeftError)
    async def left(_: HttpRequest, error: ClientLeftError) -> Response:
        return nobody_waits()

    @app.exception_handler(AnswerFailedError)
    async def given_up(_: HttpRequest, error: AnswerFailedError) -> Response:
        return _answer(of_error(error.error))

    @app.exception_handler(Exception)
    async def failed(_: HttpRequest, error: Exception) -> Response:
        return _answer(of_error(error))

    # Not only by the handler of every exception: that one's are raised again, as unexpected.
    for expected in (RequestError, QueueFullError, EngineClosedError):
        app.add_exception_handler(expected, failed)


def _add_models(app: FastAPI, engine: Engine) -> None:
    created = int(time.time())

    def described(lane: Lane) -> dict[str, Any]:
        return {
            "id": lane.name,
            "object": "model",
            "created": created,
            "owned_by": "kvfold",
            "context_length": lane.context,
            "folded": lane.attachment is not None,
        }

    @app.get("/v1/models", responses=FAULT_ANSWERS)
    async def models() -> dict[str, Any]:
        """Every model that is served: the plain one, and one for each add-on."""
        return {"object": "list", "data": [described(lane) for lane in engine.lanes.values()]}

    @app.get("/v1/models/{model}", responses=FAULT_ANSWERS)
    async def one_model(model: str) -> dict[str, Any]:
        """One of them."""
        return described(_lane(engine, model))


def _lane(engine: Engine, name: str) -> Lane:
    if name not in engine.lanes:
        raise ModelNotServedError(name)
    return engine.lanes[name]


def _add_watching(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.get("/health", responses={503: {"description": "It takes no requests."}})
    async def health() -> JSONResponse:
        """Whether requests are taken."""
        alive = engine.is_open
        said = {"status": "ok" if alive else "shutting down"}
        return JSONResponse(said, 200 if alive else 503)

    @app.get("/metrics", response_class=Response, responses=FAULT_ANSWERS)
    async def figures() -> Response:
        """Figures for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_completions(app: FastAPI, completions: Completions) -> None:
    @app.post("/v1/chat/completions", response_model=None, responses=FAULT_ANSWERS)
    async def chat(wanted: ChatRequest, http: HttpRequest) -> Response:
        """Continue a conversation."""
        lane = _lane(completions.engine, wanted.model)
        asked = await run_in_threadpool(ask_chat, lane, wanted, completions.limits)
        form = ChatForm(
            wanted.model,
            lane.tokenizer,
            with_tools=bool(wanted.tools) and wanted.tool_choice != "none",
            scored=bool(wanted.logprobs),
        )
        return await completions.answer(http, wanted, asked, form)

    @app.post("/v1/completions", response_model=None, responses=FAULT_ANSWERS)
    async def completion(wanted: CompletionRequest, http: HttpRequest) -> Response:
        """Continue a text."""
        lane = _lane(completions.engine, wanted.model)
        asked = await run_in_threadpool(ask_completion, lane, wanted, completions.limits)
        echoes = [
            echo
            for request, echo in zip(asked.requests, asked.echoes, strict=True)
            for _ in range(request.choices)
        ]
        form = CompletionForm(wanted.model, lane.tokenizer, echoes=echoes, top=wanted.logprobs)
        return await completions.answer(http, wanted, asked, form)
