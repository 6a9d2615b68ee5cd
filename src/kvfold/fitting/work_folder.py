"""The folder where a run keeps what it needs to go on: of one run at a time, and of runs alone.

A lock in it tells whose folder it is: as long as a run holds it no other may come in, and a folder
without one was made by somebody else and is never deleted. The lock of a process that died is free.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfold.errors import FitError
from kvfold.folder_lock import alone_in

LOCK_FILE = "run.lock"
STATE_FILE = "state.json"


@contextmanager
def held(work: Path, *, first: bool) -> Iterator[None]:
    """Hold a folder, which is made if need be, for one run.

    A folder that a run has put nothing in is gone again at its end, so that one that stopped at its
    text may simply be started again. first: whether this is the worker that writes there; the
    others go by it. Raises `FitError` while another run holds it.
    """
    if not first:
        yield
        return
    _make(work)
    refusal = FitError(
        f"the work folder {work} is in use by another run; wait for its end, or name another "
        "folder for the add-on"
    )
    ours = False
    try:
        with alone_in(work, LOCK_FILE, refusal):
            ours = True
            yield
    finally:
        if ours and [item.name for item in work.iterdir()] == [LOCK_FILE]:
            shutil.rmtree(work)  # it did nothing to go on from


def _make(work: Path) -> None:
    try:
        work.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise FitError(f"{work} must be a folder, for a run to work in; it is a file") from None


def is_of_a_run(work: Path) -> bool:
    """Whether a path is a folder that a run has made."""
    return work.is_dir() and any((work / name).exists() for name in (LOCK_FILE, STATE_FILE))


def check_free(work: Path) -> None:
    """Raise `FitError` unless a run may begin anew here: nothing is there, or an empty folder."""
    if is_of_a_run(work):
        raise FitError(
            f"an interrupted run is in {work}; go on with --resume, or delete what it did and "
            "begin anew with --force"
        )
    if work.exists() and not (work.is_dir() and not any(work.iterdir())):
        raise FitError(
            f"{work} is where the run would work, and it holds something else; name another "
            "folder for the add-on, or move it away"
        )


def delete(work: Path) -> None:
    """Delete what a run has left, and nothing else. Raises `FitError` while another holds it."""
    if is_of_a_run(work):
        with held(work, first=True):
            pass
        shutil.rmtree(work)
