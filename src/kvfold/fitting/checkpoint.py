"""Where a fit stands, on disk, so that an interrupted one goes on where it was.

One file, written beside itself and then renamed, so that an interruption leaves the last one
whole. It names the job it belongs to: plan, model, text and settings.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import FitError
from kvfold.fitting.workers import ALONE, Workers

FORMAT_VERSION = 2
SECONDS = "seconds_so_far"
"""The key of a checkpoint that says how long its job has run."""


def job_digest(*parts: str, tokens: Tensor) -> str:
    """A digest of everything that decides what a fit computes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    digest.update(str(tuple(tokens.shape)).encode())
    for start in range(0, len(tokens), 4096):
        rows = tokens[start : start + 4096].cpu().contiguous()
        digest.update(rows.numpy().tobytes())
    return digest.hexdigest()


def save_checkpoint(path: Path, job: str, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        torch.save({"format_version": FORMAT_VERSION, "job": job, **state}, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_checkpoint(path: Path, job: str) -> dict[str, Any] | None:
    """The state of a checkpoint of this job, None if there is no file.

    Raises `FitError` for a file that is damaged or belongs to another job; it is not touched.
    """
    if not path.exists():
        return None
    remedy = f"name another file, or delete {path} to start anew"
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FitError(
            f"the fit's checkpoint {path} must be one that kvfold wrote; it can't be read "
            f"({type(error).__name__}); {remedy}"
        ) from error
    if not isinstance(state, dict) or state.get("format_version") != FORMAT_VERSION:
        raise FitError(f"{path} must be a checkpoint of a fit, and is something else; {remedy}")
    if state.get("job") != job:
        raise FitError(
            f"the checkpoint {path} must belong to this fit; it was made with another plan, "
            f"model, text, batch or ridge; {remedy}"
        )
    return state


def seconds_in(path: Path) -> float:
    """Seconds of work that went into a checkpoint, over all runs; 0 without one that can be read.

    Work that was lost, since it came after the last checkpoint of an interrupted run, is not in it.
    """
    if not path.exists():
        return 0.0
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return float(state[SECONDS])
    except Exception:  # noqa: BLE001 - what is wrong with it is told where it is loaded
        return 0.0


@dataclass
class Checkpoint:
    """Where one job keeps how far it is; without a path nothing is kept.

    job: see `job_digest`. every: steps or batches after which it is due. workers: those that do
    the job; the first writes, and all go on from what it wrote.
    """

    path: Path | None
    job: str
    every: int
    workers: Workers = ALONE
    _earlier: float = field(default=0.0, init=False)
    _started: float = field(default_factory=time.perf_counter, init=False)

    @property
    def seconds(self) -> float:
        """Seconds since it was made, and those of the runs that it goes on from."""
        return self._earlier + time.perf_counter() - self._started

    def load(self) -> dict[str, Any] | None:
        """What was saved last, None for nothing.

        Raises as `load_checkpoint`, and `FitError` unless all workers find the same.
        """
        if self.path is None:
            return None
        if self.workers.count > 1:
            self.workers.agree("checkpoint", *_file_numbers(self.path))
        saved = load_checkpoint(self.path, self.job)
        self._earlier = 0.0 if saved is None else float(saved[SECONDS])
        return saved

    def due(self, done: int) -> bool:
        """Whether to save after so many steps."""
        return self.path is not None and done > 0 and done % self.every == 0

    def save(self, state: dict[str, Any]) -> None:
        """Write atomically, if there is a path and this is the first worker."""
        if self.path is not None and self.workers.first:
            save_checkpoint(self.path, self.job, {**state, SECONDS: self.seconds})

    def remove(self) -> None:
        """Delete the file: the job is done."""
        if self.path is not None and self.workers.first:
            self.path.unlink(missing_ok=True)


def _file_numbers(path: Path) -> list[int]:
    """Numbers that tell files apart; none of a file is there as another's."""
    if not path.exists():
        return [0, 0, 0]
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").digest()
    return [1, *(int.from_bytes(part) for part in (found[:6], found[6:12]))]
