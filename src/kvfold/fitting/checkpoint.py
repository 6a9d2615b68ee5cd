"""Where a fit stands, on disk, so that an interrupted one goes on where it was.

One file, written beside itself and then renamed, so that an interruption leaves the last one
whole. It names the job it belongs to: plan, model, text and settings.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import FitError

FORMAT_VERSION = 1


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
