"""Two real processes: the same sums and the same fit as one, and a clear end if one is lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvfold
from kvfold.errors import CorpusError, MissingExtraError
from kvfold.fitting.fit import fit
from kvfold.fitting.workers import ALONE, Workers
from kvfold.plan import Plan

JOB = Path(__file__).with_name("worker_job.py")
LOST = 17
SUMS_CLOSE = 1e-6
"""Batches of float32 products added up in another order, about another shift."""
WORK_CLOSE = 1e-3
"""The closed form multiplies differences of the sums by the features' condition, which ridge keeps
below 1e5.
"""
PATIENCE = 600.0

pytest.importorskip("accelerate", reason="accelerate is missing: pip install 'kvfold[train]'")


def _run(job: str, folder: Path, count: int) -> list[tuple[int, str]]:
    """Exit status and stderr of each of `count` processes of a job."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "PYTHONPATH": str(Path(kvfold.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "ACCELERATE_USE_CPU": "true",
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(JOB), job, str(folder)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[1] for process in running]
        return [(process.returncode, text) for process, text in zip(running, said, strict=True)]
    finally:
        for process in running:
            process.kill()


def _finished(job: str, folder: Path, count: int) -> list[dict[str, Any]]:
    """What each process of a job that must succeed has written."""
    for status, said in _run(job, folder, count):
        assert status == 0, said
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.mark.slow
def test_sums_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    (alone,) = _finished("sums", tmp_path / "one", 1)
    both = _finished("sums", tmp_path / "two", 2)
    for made in both:
        assert made["count"] == alone["count"]
        for name in ("covariance", "raw", "cross", "sketch", "mean"):
            size = float(alone[name].abs().max())
            torch.testing.assert_close(
                made[name], alone[name], rtol=SUMS_CLOSE, atol=SUMS_CLOSE * size
            )
        assert float(made["sum"]) == 3.0
        assert float(made["average"]) == 1.5
        assert float(made["of_first"]) == 1.0
    for name, tensor in both[0].items():
        assert name == "count" or torch.equal(tensor, both[1][name]), name


@pytest.mark.slow
def test_a_fit_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    (alone,) = _finished("fit", tmp_path / "one", 1)
    first, second = _finished("fit", tmp_path / "two", 2)
    assert not (tmp_path / "two" / "checkpoint").exists()
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    _assert_same_work(first, alone)


def _assert_same_work(made: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Weights differ where features depend on each other, and components have signs."""
    for name, expected in wanted["decoded"].items():
        close = WORK_CLOSE * float(expected.abs().max())
        torch.testing.assert_close(made["decoded"][name], expected, rtol=0.0, atol=close)


@pytest.mark.slow
def test_a_lost_worker_ends_the_run_and_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    (status, said), (other, _) = _run("killed", folder, 2)
    assert other == 1
    assert status == LOST, said
    assert "one of them is lost" in said and "same checkpoint" in said
    assert (folder / "checkpoint").exists()
    (resumed,) = _finished("fit", folder, 1)
    (alone,) = _finished("fit", tmp_path / "alone", 1)
    _assert_same_work(resumed, alone)


@pytest.mark.slow
def test_workers_that_differ_are_told(tmp_path: Path) -> None:
    for status, said in _run("differing", tmp_path, 2):
        assert status == 0, said
    for rank in range(2):
        assert "the same checkpoint" in (tmp_path / f"{rank}.txt").read_text()


def test_a_process_alone_needs_no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    workers = Workers.join()
    assert (workers.rank, workers.count, workers.first) == (0, 1, True)
    rows = torch.arange(5.0)
    for done in (workers.share, workers.all_sum, workers.all_mean, workers.all_of_first):
        assert torch.equal(done(rows.clone()), rows)
    workers.barrier()
    workers.agree("seed", 1)


def test_several_processes_without_accelerate_are_told_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MissingExtraError, match=r"kvfold\[train\]"):
        Workers.join()


def test_more_workers_than_windows_are_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    plan = Plan.from_dict({"window": 4, "depth": [{"method": "ced", "split": 0, "layers": [0]}]})
    tokens = torch.randint(3, 97, (2, 64))
    with pytest.raises(CorpusError, match="every worker must have text"):
        fit(model, plan, tokens, progress=False, workers=Workers(0, 3))
    assert ALONE.count == 1
