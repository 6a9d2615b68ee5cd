"""`kvfold serve`, from the command line to the last answer."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from kvfold.cli.serve import is_loopback


@contextmanager
def served(folder, *arguments):
    """A server as a user would run it: its process, its URL, and what it said before that."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvfold", "serve", str(folder), *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        found, said, deadline = None, "", time.monotonic() + 120
        while found is None:
            assert process.poll() is None and time.monotonic() < deadline, said
            line = process.stderr.readline()
            said += line
            found = re.search(r"API: (http://[0-9.:]+)/v1", line)
        yield process, found[1], said
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_server_starts_answers_and_ends(tiny_folder, tmp_path):
    """With a key, until SIGTERM; what the store was to write is written."""
    keys = tmp_path / "keys"
    keys.write_text("\nsecret\n")
    options = ["--api-key-file", keys, "--store", tmp_path / "store", "--store-plain"]
    with served(tiny_folder, "--port", 0, "--max-batch", 2, *options) as (process, url, _):
        with httpx.Client(
            base_url=url, headers={"authorization": "Bearer secret"}, timeout=60
        ) as http:
            name = http.get("/v1/models").json()["data"][0]["id"]
            assert name == str(tiny_folder)
            asked = {"model": name, "prompt": "ab" * 150, "max_tokens": 3}
            assert http.post("/v1/completions", json=asked).is_success
            assert "<title>kvfold</title>" in http.get("/").text
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    lines = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
    assert {line["status"] for line in lines if line["message"] == "request"} == {200}
    assert process.returncode == 0, rest
    assert len(list((tmp_path / "store").glob("*.kvfold"))) == 1


def test_a_second_interrupt_while_answering_ends_at_once(tiny_folder, addon_folder):
    """Whoever waits is told so, and the process ends as others do."""
    options = ["--addon", addon_folder, "--port", 0, "--max-batch", 1]
    with served(tiny_folder, *options) as (process, url, _):
        models = httpx.get(url + "/v1/models").json()["data"]
        (name,) = [model["id"] for model in models if model["folded"]]
        asked = {"model": name, "prompt": "ab", "max_tokens": 450, "logit_bias": {"2": -100}}
        waited = []

        def wait():
            waited.append(httpx.post(url + "/v1/completions", json=asked, timeout=60))

        waiting = threading.Thread(target=wait)
        streamed = {**asked, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=streamed, timeout=60) as on:
            lines = on.iter_lines()
            next(lines)
            waiting.start()
            deadline = time.monotonic() + 10
            while "kvfold_waiting_requests 1" not in httpx.get(url + "/metrics").text:
                assert time.monotonic() < deadline
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        waiting.join(30)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert waited[0].status_code == 503
    assert waited[0].json()["error"]["code"] == "shutting_down"
    assert "Traceback" not in rest
    assert "terminate" not in rest


def test_a_port_in_use_is_told_before_anything_is_loaded(kvfold):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = kvfold("serve", "no-such-model", "--port", port)
    assert done.exit_code == 2
    told = " ".join(done.output.split())
    assert told.startswith("Error: ")
    assert f"127.0.0.1, port {port}, can't be had" in told
    assert "no-such-model" not in told


def test_an_unusable_store_is_told_before_anything_is_loaded(kvfold, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "deep")
    done = kvfold("serve", "no-such-model", "--port", 0, "--store", tmp_path / "link")
    assert done.exit_code == 2
    told = " ".join(done.output.split())
    assert "a link to nothing is in its place" in told
    assert "no-such-model" not in told


def test_a_server_on_all_addresses_names_one_that_a_browser_finds(tiny_folder):
    with served(tiny_folder, "--host", "0.0.0.0", "--port", 0) as (process, url, said):
        assert url.startswith("http://127.0.0.1:")
        assert f"A page to try it: {url}/" in said
        assert "all IPv4 addresses" in said
        assert httpx.get(url + "/health").is_success
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--demo", "--addon", "x"], "--demo names model"),
        (["--api-key-file", "/nowhere"], "can't read the keys"),
        (["--api-key-file", os.devnull], "must hold a key"),
        (["--no-plain", "--port", "0"], "there must be one"),
        (["--host", ".."], "can't be had"),
        (["--port", "0", "--store", "/proc/self"], "files can be written to"),
    ],
)
def test_options_that_make_no_sense_are_refused(kvfold, tiny_folder, arguments, told):
    model = [] if "--demo" in arguments else [tiny_folder]
    done = kvfold("serve", *model, *arguments)
    assert done.exit_code == 2
    assert told in " ".join(done.output.replace("│", " ").split())


def test_only_this_machine_is_loopback():
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "me.example")] == [
        True, True, True, False, False,
    ]  # fmt: skip
