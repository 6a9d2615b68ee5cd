"""A live server refuses what it can't trust in its store, says so, and makes it anew."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.serving.lane import Lane, LaneSettings
from kvfold.serving.stored import StoredPrefixes
from kvfold.store.prefix_store import PrefixStore

CED = {"anchors": 2, "window": 6, "depth": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}]}
PROMPT = [5 + 7 * n % 200 for n in range(80)]
ASKED = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 1}


@pytest.fixture
def stored_lane(tiny_model: Any, byte_tokenizer: Any, serving: Any) -> Any:
    """`stored_lane(folder)`: a lane over a store; `dtype` and `addon_seed` make it another one."""
    made = []

    def make(folder: Path, *, dtype: torch.dtype = torch.float32, addon_seed: int = 0) -> Lane:
        model = tiny_model("llama", vocab_size=len(byte_tokenizer), dtype=dtype)
        addon = serving.RandomAddOn(model, Plan.from_dict(CED))
        addon.pipelines.to(dtype)
        if addon_seed:
            for weight in addon.pipelines.parameters():
                weight.data *= 1.5
        attachment = attach(model, addon, keep_codes=True)
        store = StoredPrefixes(PrefixStore(folder, block=8), attachment, block=16)
        made.append(Lane("ced", model, byte_tokenizer, attachment, store, LaneSettings()))
        return made[-1]

    yield make
    for lane in made:
        lane.store.close()
        lane.attachment.detach()


def ask(url: str, model: str = "ced", **keys: Any) -> tuple[int, Any]:
    """How many tokens came from the store, and what was answered, scores included."""
    answer = httpx.post(url + "/v1/completions", json={**ASKED, "model": model, **keys}, timeout=60)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    (choice,) = said["choices"]
    return said["usage"]["prompt_tokens_details"]["cached_tokens"], choice


def the_file(folder: Path, seconds: float = 20) -> Path:
    """The one snapshot of a store, once its writer is done."""
    deadline = time.monotonic() + seconds
    while not (found := list(folder.glob("*.kvfold"))):
        assert time.monotonic() < deadline, "no snapshot was written"
        time.sleep(0.01)
    assert len(found) == 1
    return found[0]


def flip(content: bytes) -> bytes:
    return content[:-40] + bytes([content[-40] ^ 4]) + content[-39:]


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "checksum does not match"),
        (cut, "as if it were cut off"),
        (lambda content: b"", "empty, truncated"),
        (lambda content: b"x" * len(content), "no safetensors"),
    ],
    ids=["flipped byte", "truncated", "empty", "other bytes"],
)
def test_a_damaged_file_is_refused_with_a_line_in_the_log_and_made_again(
    damage: Callable[[bytes], bytes],
    reason: str,
    stored_lane: Any,
    serve: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = serve({"ced": stored_lane(tmp_path)})
    cached, first = ask(server.url)
    assert cached == 0
    file = the_file(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert ask(server.url) == (0, first)
    assert "dropped the stored cache" in caplog.text
    assert reason in caplog.text
    again = the_file(tmp_path).read_bytes()
    assert (len(again), again[-1000:]) == (len(whole), whole[-1000:])
    assert ask(server.url) == (64, first)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"addon_seed": 1}, "an add-on of the same plan and other weights"),
        ({"dtype": torch.float64}, "made in float64, and the model is in float32"),
    ],
    ids=["add-on", "dtype"],
)
def test_what_another_server_made_is_not_found_and_refused_under_our_name(
    other: dict[str, Any],
    reason: str,
    stored_lane: Any,
    serve: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Names tell who made a file; one that was put under another's name is refused by content."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    stranger = serve({"ced": stored_lane(theirs, **other)})
    strange = ask(stranger.url)[1]
    foreign = the_file(theirs)
    server = serve({"ced": stored_lane(theirs)})
    cached, first = ask(server.url)
    assert cached == 0
    assert first != strange
    server = serve({"ced": stored_lane(ours)})
    assert ask(server.url) == (0, first)
    the_file(ours).write_bytes(foreign.read_bytes())
    assert ask(server.url) == (0, first)
    assert reason in caplog.text
    the_file(ours)
    assert ask(server.url) == (64, first)


STUCK_IN_A_WRITE = """
import sys, time
from kvfold.cli import main
from kvfold.store import folder
folder.os = type("Stuck", (), {**vars(folder.os), "replace": lambda *_: time.sleep(600)})
sys.argv[0] = "kvfold"
main()
"""


@pytest.mark.slow
def test_a_server_killed_during_a_write_loses_that_snapshot_alone(
    serve: Any, tmp_path: Path
) -> None:
    """`kill -9` when all bytes are on disk and the name is not; then another server starts."""
    from kvfold.cli.options import load_addons
    from kvfold.cli.serve import stores_in
    from kvfold.models import load
    from kvfold.serving.loading import close_lanes, make_lanes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    arguments = ["serve", "tiny-hybrid", "--addon", "tiny-hybrid-card", "--no-plain"]
    running = subprocess.Popen(
        [
            sys.executable, "-c", STUCK_IN_A_WRITE, *arguments,
            "--port", str(port), "--store", str(tmp_path),
        ],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_for(url, running)
        wanted = {"model": "tiny-hybrid-card", "prompt": [5 + n % 50 for n in range(600)]}
        cached, first = ask(url, **wanted)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".*.tmp")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert (cached, list(tmp_path.glob("*.kvfold"))) == (0, [])
    model, tokenizer = load("tiny-hybrid")
    lanes = make_lanes(
        model,
        tokenizer,
        load_addons(["tiny-hybrid-card"], model),
        plain=None,
        settings=LaneSettings(),
        store_of=stores_in(str(tmp_path), 2**30),
    )
    server = serve(lanes)
    assert ask(server.url, **wanted)[0] == 0
    the_file(tmp_path)
    cached, again = ask(server.url, **wanted)
    assert (cached, again["text"]) == (512, first["text"])
    close_lanes(lanes.values())
    assert not list(tmp_path.glob(".*.tmp"))


def _wait_for(url: str, running: Any) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert running.poll() is None
        assert time.monotonic() < deadline
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
