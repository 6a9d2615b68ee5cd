"""Whether a file can be written, told before the work whose figures it is to hold."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvfold.errors import ReportError
from kvfold.evaluation.report import place_of


def check_writable(path: Path) -> None:
    """Raise `ReportError` for a file that can't be written; nothing of it is left behind.

    Folders that are not there yet are made only when the file is written, so what is tried is the
    nearest one that is there.
    """
    if os.path.isdir(path):  # a name too long is none, and told below
        raise ReportError(f"can't write {path}: it is a folder; name a file in it")
    place = place_of(path)
    folder = place.parent
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{place.name[:40]}."):
            pass
    except OSError as error:
        raise ReportError(
            f"can't write {path}: {error.strerror or error}; name another file"
        ) from None
