"""A worker that dies, hangs, or talks nonsense ends a run with the reason, not with a riddle.

Scripts of a few lines stand in for the worker where it is the other end that is tested.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch

from kvfold.errors import PeerError
from kvfold.evaluation.peers.process import running

HELLO = "import sys, json; print('{\"tensors\": []}', flush=True); line = sys.stdin.readline()\n"


@pytest.fixture
def script(tmp_path):
    """`script(text)`: a worker that says hello, takes a request and then runs that text."""

    def make(text, hello=HELLO):
        path = tmp_path / "worker.py"
        path.write_text(hello + text)
        return running("snapkv@4x", sys.executable, [], script=path, timeout_seconds=20)

    return make


def test_tensors_come_after_the_line_that_lists_them(script):
    text = (
        "import struct\n"
        "print(json.dumps({'n': json.loads(line)['op'], 'tensors': [['a', [2, 1]], ['b', []]]}))\n"
        "sys.stdout.flush(); sys.stdout.buffer.write(struct.pack('3f', 1, 2.5, -3))\n"
    )
    with script(text) as worker:
        data, tensors = worker.ask("read")
    assert data == {"n": "read"}
    assert tensors["a"].tolist() == [[1.0], [2.5]] and tensors["b"] == torch.tensor(-3.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sys.exit('no memory')", r"ended with status 1.*no memory"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ('print(\'{"tensors": [["a", [900]]]}\', flush=True)', "ended with status 0"),
    ],
)
def test_a_worker_that_dies_says_how_and_what_it_said(script, text, said):
    with (
        script(text) as worker,
        pytest.raises(PeerError, match=rf"(?s)snapkv@4x {said}|{said}") as caught,
    ):
        worker.ask("read")
    assert "goes on where it stopped" in str(caught.value)


def test_a_worker_that_is_dead_before_it_is_asked_is_told_so(script):
    with script("") as worker:
        worker.process.stdin.write(b"\n")
        worker.process.stdin.flush()
        worker.process.wait()
        with pytest.raises(PeerError, match="ended with status 0"):
            worker.ask("read", rows=[list(range(100_000))])


def test_a_worker_that_never_answers_is_ended(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(HELLO + "import time; time.sleep(60)\n")
    begin = time.monotonic()
    with running("kvzip@4x", sys.executable, [], script=path, timeout_seconds=1.5) as worker:
        with pytest.raises(PeerError, match=r"no answer within 2 seconds"):
            worker.ask("read")
        assert worker.process.poll() is not None
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("line", ["hello", "[1]", '{"other": 1}'])
def test_anything_but_an_answer_is_shown(script, line):
    with script(f"print({line!r}, flush=True)") as worker, pytest.raises(PeerError) as caught:
        worker.ask("read")
    assert "must answer in JSON lines" in str(caught.value) and line in str(caught.value)


def test_an_error_of_the_worker_comes_with_the_end_of_what_it_wrote(script):
    text = (
        "print('10%\\r90%\\nthe reason', file=sys.stderr, flush=True)\n"
        'print(\'{"error": "ValueError: no", "tensors": []}\', flush=True)\n'
    )
    with script(text) as worker, pytest.raises(PeerError) as caught:
        worker.ask("read")
    message = str(caught.value)
    assert "snapkv@4x can't answer: ValueError: no" in message
    assert message.endswith("90%\nthe reason")


def test_a_worker_that_can_not_start_is_named(tmp_path):
    with (
        pytest.raises(PeerError, match=r"(?s)status.*can't open file"),
        running("plain", sys.executable, [], script=tmp_path / "none.py"),
    ):
        pass
    with (
        pytest.raises(PeerError, match="can't be started"),
        running("plain", tmp_path / "no-python", []),
    ):
        pass


def test_the_process_is_gone_after_an_error_of_our_own(script):
    with pytest.raises(KeyError), script("sys.stdin.read()") as worker:
        raise KeyError
    assert worker.process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(worker.process.pid, signal.SIGTERM)
