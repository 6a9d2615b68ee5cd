"""A run of tasks that is killed by the system, at moments that nobody chose, loses nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvfold

KILLS = 3
COMMAND = (
    "-m kvfold evaluate tiny-hybrid --addon tiny-hybrid-card --tasks recall,perplexity "
    "--limit 24 --lengths 256 --batch 4 --no-speed"
)


def started(folder, jobs):
    """The command in a process of its own."""
    source = Path(kvfold.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, *COMMAND.split(), "--jobs", str(jobs), "--out", str(folder)],
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def answered(folder):
    """Bytes of answers that are on the disk."""
    return sum(path.stat().st_size for path in folder.rglob("*.jsonl"))


def killed_after_an_answer(folder, draw, jobs):
    """Start, wait for one more answer and a moment, and kill; whether there was time to."""
    before, process = answered(folder), started(folder, jobs)
    while process.poll() is None and answered(folder) == before:
        time.sleep(0.01)
    time.sleep(draw.random() * 0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is of POSIX systems")
@pytest.mark.parametrize("jobs", [1, 2])
def test_killed_by_the_system_and_started_again_it_ends_with_the_same_bytes(tmp_path, jobs):
    whole, broken, draw = tmp_path / "whole", tmp_path / "broken", random.Random(7)
    process = started(whole, 1)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    kills = [killed_after_an_answer(broken, draw, jobs) for _ in range(KILLS)]
    assert any(kills), "the run ended before it could be killed; give it more items"
    process = started(broken, jobs)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert (broken / "metrics.json").read_bytes() == (whole / "metrics.json").read_bytes()
    assert answered(broken) == answered(whole)
