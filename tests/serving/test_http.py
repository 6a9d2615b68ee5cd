"""What plain HTTP gets: errors in one shape, limits, keys, metrics, cancelling, shutting down."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvfold.serving.gates import JsonLines

CHAT = "/v1/chat/completions"
BODY = {"model": "ced", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
LONG = {
    "model": "ced", "prompt": "ab", "max_tokens": 400, "stream": True, "logit_bias": {"2": -100},
}  # fmt: skip


def check_error(answer: httpx.Response, status: int, told: str = "") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert told in error["message"]
    made: dict[str, Any] = error
    return made


def rows(http: httpx.Client, model: str = "ced") -> float:
    lines = http.get("/metrics").text.splitlines()
    name = f'kvfold_rows{{model="{model}"}} '
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "valid JSON"),
        (b"", "body"),
        (b"[]", "dictionary"),
        (b"null", "body"),
        (b"\xff\xfe", ""),
        (b'{"model": "ced"}', "messages"),
        (b'{"model": 3, "messages": "x"}', "model"),
        (json.dumps({**BODY, "max_tokens": "5"}).encode(), "max_tokens"),
        (json.dumps({**BODY, "max_tokens": True}).encode(), "max_tokens"),
        (json.dumps({**BODY, "temperature": float("nan")}).encode(), "temperature"),
        (json.dumps({**BODY, "seed": 2**80}).encode(), "seed"),
        (json.dumps({**BODY, "nonsense": 1}).encode(), "nonsense"),
        (json.dumps({**BODY, "stop": ""}).encode(), "stop"),
        (json.dumps({**BODY, "messages": [{"role": "king", "content": "x"}]}).encode(), "role"),
    ],
)
def test_a_body_that_is_wrong_is_told_so(http: httpx.Client, content: bytes, told: str) -> None:
    answer = http.post(CHAT, content=content, headers={"content-type": "application/json"})
    check_error(answer, 400, told)


def test_deeply_nested_json_is_refused(http: httpx.Client) -> None:
    body = b'{"model":' + b"[" * 9000
    check_error(http.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)


def test_paths_and_methods_that_are_not_there(http: httpx.Client) -> None:
    check_error(http.get("/v2/nothing"), 404)
    check_error(http.get(CHAT), 405)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_not_read(http: httpx.Client, chunked: bool) -> None:
    body = json.dumps({**BODY, "user": "x" * 30_000}).encode()
    content = iter([body[:100], body[100:]]) if chunked else body
    answer = http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert check_error(answer, 413)["code"] == "request_too_large"


def test_streams_are_server_sent_events(http: httpx.Client) -> None:
    with http.stream("POST", CHAT, json={**BODY, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    objects = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {made["object"] for made in objects} == {"chat.completion.chunk"}
    assert len({made["id"] for made in objects}) == 1


def test_metrics_tell_what_was_done(http: httpx.Client) -> None:
    def figure(name: str) -> float:
        found = [
            line for line in http.get("/metrics").text.splitlines() if line.startswith(name + "{")
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if 'model="ced"' in line)

    names = ("kvfold_prompt_tokens_total", "kvfold_generated_tokens_total")
    before = [figure(name) for name in names]
    http.post("/v1/completions", json={"model": "ced", "prompt": "abcd", "max_tokens": 3, "n": 2})
    assert [figure(name) - old for name, old in zip(names, before, strict=True)] == [4, 6]
    assert "kvfold_waiting_requests 0" in http.get("/metrics").text
    assert (
        'kvfold_http_requests_total{path="/v1/completions",status="200"}'
        in http.get("/metrics").text
    )


def test_health(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_row_within_a_second(
    http: httpx.Client, streamed: bool
) -> None:
    if streamed:
        with http.stream("POST", "/v1/completions", json=LONG) as answer:
            next(answer.iter_lines())
            left = time.monotonic()
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={**LONG, "stream": False}, timeout=0.3)
        left = time.monotonic()
    while rows(http):
        assert time.monotonic() - left < 1
        time.sleep(0.02)


def test_the_log_tells_when_the_row_of_a_client_that_left_was_free(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """By the name that the client gave its request; one that no log can hold is replaced."""
    names = {"x-request-id": "my-own.1"}
    with caplog.at_level(logging.INFO, "kvfold.serving"):
        with http.stream("POST", "/v1/completions", json=LONG, headers=names) as answer:
            next(answer.iter_lines())
            assert answer.headers["x-request-id"] == "my-own.1"
        deadline = time.monotonic() + 5
        while not (freed := [r for r in caplog.records if r.getMessage() == "row freed"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    line = json.loads(JsonLines().format(freed[0]))
    assert (line["request"], line["model"]) == ("my-own.1", "ced")
    assert 0 <= line["seconds_after_leaving"] < 1
    answer = http.get("/health", headers={"x-request-id": 'so"x'})
    assert answer.headers["x-request-id"].isalnum()


def test_a_full_queue_gets_429(serve: Any, lane: Any) -> None:
    server = serve({"ced": lane("ced", max_rows=1)}, queue=0)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()  # without a name it would be closed, and the stream with it
            next(lines)
            refused = http.post(CHAT, json=BODY)
            assert check_error(refused, 429)["code"] == "queue_full"
            assert refused.headers["retry-after"] == "1"
            check_error(http.post(CHAT, json={**BODY, "stream": True}), 429)
        deadline = time.monotonic() + 2
        while http.post(CHAT, json=BODY).status_code == 429:
            assert time.monotonic() < deadline


def test_shutting_down_lets_answers_finish(serve: Any, lane: Any) -> None:
    server = serve({"ced": lane("ced", max_rows=1)})
    finished: list[str] = []

    def wait() -> None:
        asked = {**LONG, "max_tokens": 30, "stream": False}
        answer = httpx.post(server.url + "/v1/completions", json=asked, timeout=60)
        finished.append(answer.json()["choices"][0]["finish_reason"])

    waiting = threading.Thread(target=wait)
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**LONG, "max_tokens": 60}
    ) as on:
        lines = on.iter_lines()
        next(lines)
        waiting.start()
        while not server.engine.state().waiting:
            time.sleep(0.01)
        server.server.should_exit = True
        assert [line for line in lines if line][-1] == "data: [DONE]"
    waiting.join(60)
    server.thread.join(60)
    assert finished == ["length"]
    assert not server.engine.is_open
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")


@pytest.mark.parametrize("forced", [True, False])
def test_what_is_not_done_in_time_is_told_that_it_will_not_be(
    serve: Any, lane: Any, forced: bool
) -> None:
    """Forced, or when the time to finish is over; and the engine has ended before the server."""
    server = serve({"ced": lane("ced", max_rows=1)}, drain_seconds=60.0 if forced else 0.2)
    told: list[httpx.Response] = []

    def wait() -> None:
        asked = {**LONG, "stream": False}
        told.append(httpx.post(server.url + "/v1/completions", json=asked, timeout=60))

    waiting = threading.Thread(target=wait)
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG) as on:
        lines = on.iter_lines()
        next(lines)
        waiting.start()
        while not server.engine.state().waiting:
            time.sleep(0.01)
        server.server.should_exit = True
        server.server.force_exit = forced
        last = [line for line in lines if line][-1]
    waiting.join(30)
    server.thread.join(30)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert check_error(told[0], 503)["code"] == "shutting_down"
    assert not server.engine.is_running


def test_a_server_with_keys_wants_one(serve: Any, lane: Any) -> None:
    server = serve({"ced": lane("ced")}, keys=("secret", "other"), cors=("http://page.example",))
    with httpx.Client(base_url=server.url) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            answer = http.get("/v1/models", headers=headers)
            assert check_error(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert check_error(http.get("/metrics"), 401)
        assert http.get("/v1/models", headers={"authorization": "Bearer other"}).is_success
        assert http.get("/health").is_success
        origin = {"origin": "http://page.example"}
        asked = {**origin, "access-control-request-method": "POST"}
        preflight = http.options(CHAT, headers=asked)
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        refused = http.post(CHAT, json=BODY, headers=origin)
        assert refused.headers["access-control-allow-origin"] == "http://page.example"
        strange = http.get("/health", headers={"origin": "http://elsewhere.example"})
        assert "access-control-allow-origin" not in strange.headers


def test_a_fault_inside_tells_nothing_of_it(
    serve: Any, lane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lane("ced")
    server = serve({"ced": made})

    def fail() -> int:
        raise OSError("secret path")

    with httpx.Client(base_url=server.url) as http, monkeypatch.context() as patch:
        patch.setattr(made, "step", fail)
        error = check_error(http.post(CHAT, json=BODY), 500)
        assert "secret" not in json.dumps(error)
        with http.stream("POST", CHAT, json={**BODY, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        # Told by the status if the fault comes before the first event, and in the stream after it.
        assert answer.status_code in (200, 500)
        told = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert told["type"] == "server_error"
        assert "secret" not in json.dumps(told)


def test_every_answer_is_logged_as_a_line_of_json(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvfold.serving.access"):
        answer = http.post(CHAT, json=BODY)
        deadline = time.monotonic() + 5
        while not caplog.records:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    line = json.loads(JsonLines().format(caplog.records[0]))
    assert line["request"] == answer.headers["x-request-id"]
    assert (line["path"], line["status"], line["model"]) == (CHAT, 200, "ced")
    assert line["usage"] == answer.json()["usage"]
    assert line["seconds"] > 0
    assert "hi" not in line.values()


@pytest.mark.slow
def test_no_request_that_the_schema_allows_or_forbids_breaks_the_server(
    serve: Any, lane: Any, scripted_lanes: Any, tmp_path: Path
) -> None:
    """schemathesis, against the schema that the server itself gives."""
    from kvfold.serving.asking import Limits

    lanes = {"ced": lane("ced"), **scripted_lanes}
    server = serve(lanes, limits=Limits(max_tokens=4))
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json",
            "--checks", "not_a_server_error", "--max-examples", "60", "--seed", "1",
            "--suppress-health-check", "all", "--no-color",
        ],
        cwd=tmp_path,  # where it leaves what it found
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
