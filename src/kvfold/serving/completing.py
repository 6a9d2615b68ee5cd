"""Running what a client asks for, and answering whole or as a stream of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from kvfold.serving.answers import Form
from kvfold.serving.asking import Asked, Limits
from kvfold.serving.engine import Engine
from kvfold.serving.faults import of_error
from kvfold.serving.gates import NOTES
from kvfold.serving.metrics import Metrics
from kvfold.serving.request import Begun, Ended, Held, Piece
from kvfold.serving.running import AnswerFailedError, ClientLeftError, Run
from kvfold.serving.schema import Common

CLIENT_LEFT = 499
"""The status that is logged for a client that did not wait; nobody reads it."""
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def nobody_waits() -> Response:
    """The answer to a client that has left."""
    return Response(status_code=CLIENT_LEFT)


class Completions:
    """What both kinds of completion have in common: run, and answer whole or as a stream."""

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics) -> None:
        self.engine = engine
        self.limits = limits
        self.metrics = metrics

    async def answer(self, http: HttpRequest, wanted: Common, asked: Asked, form: Form) -> Response:
        """Run what is asked for; an error before the first event has a status of its own."""
        notes: dict[str, Any] = http.scope[NOTES]
        notes["model"] = wanted.model
        run = Run(self.engine, asked, http.is_disconnected)
        if not wanted.stream:
            try:
                choices = await run.gather()
            finally:
                self._end(run, wanted.model, notes)
            return JSONResponse(form.whole(choices, run.tally))
        stream = self._stream(run, form, wanted, notes)
        first = await anext(stream, None)
        if first is None:
            return nobody_waits()
        return StreamingResponse(
            _after(first, stream), media_type="text/event-stream", headers=STREAM_HEADERS
        )

    async def _stream(
        self, run: Run, form: Form, wanted: Common, notes: dict[str, Any]
    ) -> AsyncIterator[str]:
        """Server-sent events."""
        options = wanted.stream_options
        began = False
        try:
            async for chunk in self._chunks(run, form):
                began = True
                yield _framed(chunk)
            if options is not None and options.include_usage:
                yield _framed(form.chunk([], run.tally))
            yield "data: [DONE]\n\n"
        except ClientLeftError:
            notes["left"] = True
        except AnswerFailedError as failed:
            if not began:
                raise
            notes["error"] = str(failed)
            yield _framed(of_error(failed.error).body())
        finally:
            self._end(run, wanted.model, notes)

    async def _chunks(self, run: Run, form: Form) -> AsyncIterator[dict[str, Any]]:
        """What the engine tells, written for the client."""
        opened: set[int] = set()
        async for index, event in run.events():
            if isinstance(event, Begun):
                continue
            if index not in opened:
                opened.add(index)
                for choice in form.opening(index):
                    yield form.chunk([choice])
            for choice in _choices(form, index, event):
                yield form.chunk([choice])

    def _end(self, run: Run, model: str, notes: dict[str, Any]) -> None:
        run.stop()
        notes["usage"] = run.tally.as_json()
        if run.first_piece is not None:
            waited = run.first_piece - run.began
            notes["first_token_seconds"] = round(waited, 4)
            self.metrics.first.labels(model).observe(waited)


def _choices(form: Form, index: int, event: Piece | Held | Ended) -> Iterable[dict[str, Any]]:
    if isinstance(event, Piece):
        return form.piece(index, event)
    if isinstance(event, Held):
        return form.held(index, event)
    return form.ending(index, event)


async def _after(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for item in rest:
        yield item


def _framed(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
