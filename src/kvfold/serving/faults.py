"""Every fault in the shape that OpenAI's clients read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.errors import EngineClosedError, QueueFullError, RequestError

RETRY_SECONDS = "1"
INNER_NAME = re.compile(r"str|constrained-\w+|(list|dict)\[.*\]")
"""What pydantic puts into the place of a fault for the alternatives that a field has."""


@dataclass(frozen=True)
class Fault:
    """An HTTP status and what its body says.

    kind: OpenAI's `type`. param: the part of the request at fault. code: for programs to read.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """As JSON."""
        detail = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": detail}

    def encoded(self) -> bytes:
        """As bytes."""
        return json.dumps(self.body()).encode()

    def headers(self) -> dict[str, str]:
        """What goes with the status."""
        found = {}
        if self.status == 429:
            found["retry-after"] = RETRY_SECONDS
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


UNAUTHORISED = Fault(
    401,
    "this server needs an API key, as 'Authorization: Bearer KEY'; none came, or another one",
    "authentication_error",
    code="invalid_api_key",
)


def too_large(most: int) -> Fault:
    """The body has more bytes than a request may have."""
    return Fault(
        413,
        f"a request's body may have at most {most:,} bytes; send less",
        code="request_too_large",
    )


def unknown_model(name: str, known: list[str]) -> Fault:
    """There is no such model."""
    served = ", ".join(known)
    message = f"there is no model {name[:200]!r} here; this server has: {served}"
    return Fault(404, message, param="model", code="model_not_found")


def of_error(error: Exception) -> Fault:
    """What an exception means to a client; an unexpected one tells nothing of its insides."""
    if isinstance(error, RequestError):
        return Fault(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return Fault(429, str(error), "rate_limit_error", code="queue_full")
    if isinstance(error, EngineClosedError):
        return Fault(503, str(error), "server_error", code="shutting_down")
    return Fault(
        500,
        "the server failed on this request; its log has the reason",
        "server_error",
        code="internal_error",
    )


def of_status(status: int, said: str) -> Fault:
    """For a path that does not exist, a method that it has not, and the like."""
    if status == 400:  # all that is raised so: bytes that no JSON reader takes
        return invalid_json("it is no UTF-8, nests too deeply, or has too long a number")
    codes = {404: "not_found", 405: "method_not_allowed"}
    return Fault(status, said, code=codes.get(status))


def invalid_json(reason: str) -> Fault:
    """The body can't be read at all."""
    return Fault(400, f"the body must be valid JSON; {reason}", code="invalid_json")


def of_validation(
    problems: list[Mapping[str, Any]], content: bytes, content_type: str | None
) -> Fault:
    """For a body that is no JSON, or has keys or types that it must not have.

    problems: as pydantic lists them, at least one. Only the first few are told. content: the body
    as it came, with the type that its sender gave it.
    """
    if not content:
        return invalid_json("it is empty")
    if not is_json(content_type):
        came = "none came" if content_type is None else f"got {content_type[:100]!r}"
        return Fault(
            400,
            f"a body must come with the header 'content-type: application/json'; {came}",
            code="invalid_content_type",
        )
    if problems[0]["type"] == "json_invalid":
        return invalid_json(problems[0].get("ctx", {}).get("error", "it can't be parsed"))
    told = [f"{_place(item) or 'the body'}: {item['msg']}" for item in problems]
    told = list(dict.fromkeys(told))  # alternatives of a field may object alike
    more = f"; and {len(told) - 4} more" if len(told) > 4 else ""
    return Fault(400, "; ".join(told[:4]) + more, param=_place(problems[0]) or None)


def is_json(content_type: str | None) -> bool:
    """Whether a body of this type is read as JSON."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind.startswith("application/") and re.search(r"[/+]json$", kind) is not None


def _place(item: Mapping[str, Any]) -> str:
    """As a client knows it: the field, and where in it."""
    field, *inner = [str(part) for part in item["loc"] if part != "body"] or [""]
    return ".".join([field, *(part for part in inner if not INNER_NAME.fullmatch(part))])[:200]
