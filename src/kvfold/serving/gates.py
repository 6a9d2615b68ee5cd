"""What every HTTP request passes before and after the application: key, size, log.

Plain ASGI, so that streams pass through as they come and the application still sees a client leave.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kvfold.serving.faults import UNAUTHORISED, Fault, too_large
from kvfold.serving.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

NOTES = "kvfold.notes"
"""Where in a scope the application leaves what is to be logged."""
REQUEST = "kvfold.request"
"""Where in a scope the request's own name is."""
NAME = re.compile(rb"[A-Za-z0-9._-]{1,64}")
"""What a client may name its request by, in a header `x-request-id`."""

log = logging.getLogger("kvfold.serving.access")


async def send_fault(send: Send, fault: Fault) -> None:
    """Answer with a fault."""
    body = fault.encoded()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **fault.headers(),
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": fault.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


class KeyGate:
    """Lets only those through who know a key, but for paths that are open to all."""

    def __init__(self, app: App, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self.app = app
        self.open_paths = open_paths
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http" or scope["path"] in self.open_paths or self._knows(scope):
            await self.app(scope, receive, send)
        else:
            await send_fault(send, UNAUTHORISED)

    def _knows(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        # All keys are compared, whichever fits: how long it takes must not tell which.
        same = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        return scheme.lower() == b"bearer" and any(same)


class SizeGate:
    """Stops reading a body that is too large, whatever length it claims."""

    def __init__(self, app: App, most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        claimed = dict(scope["headers"]).get(b"content-length", b"0")
        if claimed.isdigit() and int(claimed) > self.most:
            await send_fault(send, too_large(self.most))
            return
        read = 0
        answered = False

        async def counted() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most:
                # The application is told that the client has left, and what it says is dropped.
                return {"type": "http.disconnect"}
            return message

        async def replaced(message: MutableMapping[str, Any]) -> None:
            nonlocal answered
            if read <= self.most:
                await send(message)
            elif not answered:
                answered = True
                await send_fault(send, too_large(self.most))

        await self.app(scope, counted, replaced)
        if read > self.most and not answered:
            await send_fault(send, too_large(self.most))


class HeadGate:
    """Answers HEAD as the application answers GET, without the body."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def headers_only(message: MutableMapping[str, Any]) -> None:
            scope["method"] = "HEAD"  # the server counts the bytes of a body by the method
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        scope["method"] = "GET"  # not in a copy: the router's own notes go into this scope
        try:
            await self.app(scope, receive, headers_only)
        finally:
            scope["method"] = "HEAD"


class AccessLog:
    """One JSON line and one count a request, with what the application noted of it."""

    def __init__(self, app: App, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        number = _name(scope)
        notes: dict[str, Any] = {}
        scope[NOTES], scope[REQUEST] = notes, number
        status = 500

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", number.encode()),
                ]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            seconds = time.perf_counter() - started
            # The route's pattern, not what was asked for, which could make series without end.
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.answers.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(seconds)
            line = {
                "request": number,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                **notes,
            }
            log.info("request", extra={"fields": line})


def _name(scope: Scope) -> str:
    """A request's name: the client's own where it gives one that a log can hold, else a new one."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if NAME.fullmatch(given) else uuid.uuid4().hex


class JsonLines(logging.Formatter):
    """Log records as one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, and the record's `fields`."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
