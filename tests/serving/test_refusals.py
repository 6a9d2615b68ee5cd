"""What a client gets for a request that can't be had: status 400, its field and the reason."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HALF = "\ud800"
JSON = {"content-type": "application/json"}


def refused(http: httpx.Client, path: str, **keys: Any) -> dict[str, Any]:
    """The error of a request to the model `ced`."""
    # Escaped as ASCII, as a client without care for surrogates sends it.
    answer = http.post(path, content=json.dumps({"model": "ced", **keys}), headers=JSON)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("prompt", [HALF, ["fine", f"a{HALF}b"], "\udfff"])
def test_half_a_character_in_a_prompt_is_refused(http: httpx.Client, prompt: Any) -> None:
    error = refused(http, TEXT, prompt=prompt)
    assert error["param"] == "prompt"
    assert "surrogate" in error["message"]
    assert ("prompt 1" in error["message"]) == isinstance(prompt, list)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": HALF},
        {"role": "user", "content": [{"type": "text", "text": HALF}]},
        {"role": "user", "content": "x", "name": HALF},
    ],
)
def test_half_a_character_in_a_message_is_not_blamed_on_the_template(
    http: httpx.Client, message: Any
) -> None:
    error = refused(http, CHAT, messages=[{"role": "user", "content": "hi"}, message])
    assert error["param"].startswith("messages")
    assert "template" not in error["message"]
    assert "message 1" in error["message"] or error["param"].startswith("messages.1")


def test_half_a_character_in_a_tool_or_as_a_key_is_refused(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": HALF}}]
    messages = [{"role": "user", "content": "hi"}]
    assert refused(http, CHAT, messages=messages, tools=tools, model="call")["param"].startswith(
        "tools"
    )
    assert "surrogate" not in refused(http, TEXT, prompt="a", **{HALF: 1})["message"]


@pytest.mark.parametrize("digits", [11, 4300, 4301, 15_000])
def test_a_key_of_logit_bias_with_too_many_digits_is_no_token(
    http: httpx.Client, digits: int
) -> None:
    error = refused(http, TEXT, prompt="a", logit_bias={"9" * digits: 1})
    assert error["param"] == "logit_bias"
    assert "from 0 to" in error["message"]


@pytest.mark.parametrize(
    ("path", "keys", "param"),
    [
        (TEXT, {"prompt": "a", "stop": ""}, "stop"),
        (TEXT, {"prompt": "a", "stop": ["x"] * 5}, "stop"),
        (TEXT, {"prompt": "a", "stop": 3}, "stop"),
        (TEXT, {"prompt": 1.5}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [3, -1]}, "prompt"),
        (TEXT, {"prompt": [5, 261]}, "prompt"),
        (TEXT, {"prompt": "a" * 600}, "prompt"),
        (TEXT, {"prompt": "a" * 500, "max_tokens": 200}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tool_choice": 3}, "tool_choice"),
    ],
)
def test_the_field_at_fault_is_named_as_the_client_knows_it(
    http: httpx.Client, path: str, keys: dict[str, Any], param: str
) -> None:
    error = refused(http, path, **keys)
    assert error["param"] == param
    assert "constrained" not in error["message"]
    assert "list[" not in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"hello", b"\x80abc", b'{"seed": ' + b"9" * 5000 + b"}"]
)
def test_what_is_no_json_is_called_so(http: httpx.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_wrong_content_type_is_named(http: httpx.Client, kind: str | None) -> None:
    """As curl sends what it is given with -d."""
    body = json.dumps({"model": "ced", "prompt": "a", "max_tokens": 1})
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post(TEXT, content=body, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_content_type"
    assert (kind or "none came") in error["message"]
    kind = "application/json; charset=utf-8"
    assert http.post(TEXT, content=body, headers={"content-type": kind}).is_success


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/models/ced", "/page/page.js"])
def test_head_answers_like_get_without_a_body(http: httpx.Client, path: str) -> None:
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == whole.headers[name]
    assert http.head(path).is_success  # the connection is still in step


def test_head_of_what_is_not_there(http: httpx.Client) -> None:
    assert http.head("/v1/models/nobody").status_code == 404
    assert http.head(CHAT).status_code == 405
