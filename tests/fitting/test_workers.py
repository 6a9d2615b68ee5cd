"""Two real processes: the same sums and the same fit as one, and a clear end if one is lost."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvfold
from kvfold.errors import CorpusError, FitError, MissingExtraError
from kvfold.fitting.distil import distil
from kvfold.fitting.distil_settings import DistilSettings
from kvfold.fitting.fit import fit
from kvfold.fitting.mixture import Mixture, MixturePart
from kvfold.fitting.refine import RefineSettings, refine
from kvfold.fitting.workers import ALONE, Workers
from kvfold.plan import Plan
from kvfold.store.addon import AddOn

JOB = Path(__file__).with_name("worker_job.py")
LOST = 17
SUMS_CLOSE = 1e-6
"""Batches of float32 products added up in another order, about another shift."""
WORK_CLOSE = 1e-3
"""The closed form multiplies differences of the sums by the features' condition, which ridge keeps
below 1e5.
"""
CURVES_CLOSE = 1e-3
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
    (alone,) = _finished("tiny_fit", tmp_path / "one", 1)
    first, second = _finished("tiny_fit", tmp_path / "two", 2)
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
    (resumed,) = _finished("tiny_fit", folder, 1)
    (alone,) = _finished("tiny_fit", tmp_path / "alone", 1)
    _assert_same_work(resumed, alone)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe's text in it."""
    made = tmp_path_factory.mktemp("recipe")
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}, as known."}) for n in range(160)]
    (made / "data").mkdir()
    (made / "data" / "sums.jsonl").write_text("\n".join(lines))
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The recipe run by one process."""
    _finished("recipe", folder / "alone", 1)
    return folder / "alone"


def _curve(folder: Path, stage: str) -> dict[tuple[int, str], float]:
    """Losses and held-out errors by step and name, as they were logged last."""
    logged = map(json.loads, (folder / "0.jsonl").read_text().splitlines())
    lines = [line for line in logged if line.get("stage") == stage]
    names = ("loss", "kl", "held_out_kl", "held_out_error", "train_error")
    return {(line["step"], name): line[name] for line in lines for name in names if line.get(name)}


def _close(found: dict[Any, float], wanted: dict[Any, float]) -> None:
    assert wanted
    assert found.keys() == wanted.keys()
    for place, value in wanted.items():
        assert found[place] == pytest.approx(value, rel=CURVES_CLOSE), place


def test_two_processes_have_the_loss_curves_of_one(folder: Path, alone: Path) -> None:
    ended = _run("recipe", folder / "two", 2)
    assert [status for status, _ in ended] == [0, 0], ended
    for stage in ("refine", "distil"):
        _close(_curve(folder / "two", stage), _curve(alone, stage))
    first, second = (torch.load(folder / "two" / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    kept = [
        [(stage["kept"], stage["kl_after"]) for stage in json.loads(report.read_text())["stages"]]
        for report in sorted((folder / "two").glob("*.json"))
    ]
    assert kept[0] == kept[1]
    assert any(stage_kept for stage_kept, _ in kept[0])
    assert not (folder / "two" / "1.jsonl").exists()
    shown = [said for _, said in ended]
    assert "steps" in shown[0]
    assert shown[1] == ""


@pytest.fixture(scope="module")
def broken(folder: Path) -> Path:
    """The recipe, of which worker 1 was killed in the middle of distilling."""
    (status, said), (other, _) = _run("recipe_killed", folder / "broken", 2)
    assert other == 1
    assert status == LOST, said
    assert "one of them is lost" in said and "same checkpoint" in said
    assert len(list((folder / "broken" / "work").glob("3-distil-*.checkpoint"))) == 1
    return folder / "broken"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_recipe_goes_on_after_the_loss_of_a_worker(
    folder: Path, alone: Path, broken: Path, count: int
) -> None:
    again = folder / f"again-{count}"
    shutil.copytree(broken, again)
    _finished("recipe", again, count)
    _close(_curve(again, "distil"), _curve(alone, "distil"))
    logged = [json.loads(line) for line in (again / "0.jsonl").read_text().splitlines()]
    begun = next(n for n, line in enumerate(logged) if line.get("event") == "go on")
    assert min(line["step"] for line in logged[begun:] if "kl" in line) == 5


@pytest.mark.slow
def test_a_model_spread_over_two_processes_gives_the_same_add_on(folder: Path) -> None:
    wanted, _ = _finished("unsharded", folder / "whole", 2)
    for found in _finished("sharded", folder / "spread", 2):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=CURVES_CLOSE, atol=1e-5)
    whole, *spread = (
        json.loads((folder / name).read_text())
        for name in ("whole/0.json", "spread/0.json", "spread/1.json")
    )
    assert [made["held"] / made["whole"] for made in (whole, *spread)] == [1.0, 0.5, 0.5]
    assert any(stage["kept"] for stage in whole["report"]["stages"])
    cosines = [made["report"]["mean_attention_cosine"] for made in (whole, *spread)]
    assert cosines[1:] == pytest.approx([cosines[0]] * 2, rel=CURVES_CLOSE)


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


def test_rows_that_cannot_be_shared_out_evenly_are_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    plan = Plan.from_dict({"window": 4, "depth": [{"method": "ced", "split": 1, "layers": [1]}]})
    addon = AddOn.untrained(model, plan)
    tokens = torch.randint(3, 97, (2, 64))
    mixture = Mixture([MixturePart("text", tokens, 1.0)], seed=0)
    for stage, settings in ((distil, DistilSettings(rows=4)), (refine, RefineSettings(rows=4))):
        with pytest.raises(FitError, match="divisible by the number of workers"):
            stage(model, addon, mixture, tokens, settings, progress=False, workers=Workers(0, 3))


def test_more_workers_than_windows_are_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    plan = Plan.from_dict({"window": 4, "depth": [{"method": "ced", "split": 0, "layers": [0]}]})
    tokens = torch.randint(3, 97, (2, 64))
    with pytest.raises(CorpusError, match="every worker must have text"):
        fit(model, plan, tokens, progress=False, workers=Workers(0, 3))
    assert ALONE.count == 1
