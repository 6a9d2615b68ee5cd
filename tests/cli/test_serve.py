"""`kvfold serve`, from the command line to the last answer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from kvfold.cli.serve import is_loopback


def test_a_server_starts_answers_and_ends(tiny_folder, tmp_path):
    """As a user would run it, with a key, until SIGTERM."""
    keys = tmp_path / "keys"
    keys.write_text("\nsecret\n")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "kvfold", "serve", str(tiny_folder), "--port", "0",
            "--api-key-file", str(keys), "--max-batch", "2",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        url, deadline = None, time.monotonic() + 120
        while url is None:
            assert process.poll() is None and time.monotonic() < deadline
            found = re.search(r"API: (http://[0-9.:]+)/v1", process.stderr.readline())
            url = found and found[1]
        with httpx.Client(
            base_url=url, headers={"authorization": "Bearer secret"}, timeout=60
        ) as http:
            name = http.get("/v1/models").json()["data"][0]["id"]
            assert name == str(tiny_folder)
            asked = {"model": name, "prompt": "ab", "max_tokens": 3}
            assert http.post("/v1/completions", json=asked).is_success
            assert "<title>kvfold</title>" in http.get("/").text
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    lines = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
    assert {line["status"] for line in lines if line["message"] == "request"} == {200}
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--demo", "--addon", "x"], "--demo names model"),
        (["--api-key-file", "/nowhere"], "can't read the keys"),
        (["--api-key-file", os.devnull], "must hold a key"),
        (["--no-plain"], "there must be one"),
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
