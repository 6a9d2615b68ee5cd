"""Folders and files that are written whole or not at all.

A new folder is made beside the old one and takes its place by renaming. Whenever the process is
killed, the old content or the new is found: under the folder's own name, or, between two renames,
under the name that `previous` gives.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfold.errors import AddOnError


def check_replaceable(target: Path, marker: str, what: str) -> None:
    """Raise `AddOnError` unless `target` is free, empty, or holds another of the same.

    marker: the file that tells such a folder. what: what it is called in the message.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise AddOnError(f"{what} is saved as a folder; {target} is a file; name another path")
    if any(target.iterdir()) and not (target / marker).exists():
        raise AddOnError(
            f"{what} may replace only another one; {target} holds other files and no {marker}; "
            "name a new or an empty folder"
        )


@contextmanager
def replacing(target: Path, own: tuple[str, ...]) -> Iterator[Path]:
    """A folder to write `own` files to, which takes the target's place when the block ends.

    target: absolute; missing parents are made. Other files that lie in the target are kept. If the
    block fails, the target stays as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        made.chmod(0o755)
        if target.exists():
            shutil.copytree(target, made, ignore=shutil.ignore_patterns(*own), dirs_exist_ok=True)
        yield made
        for name in own:
            (made / name).chmod(0o644)  # some writers make private files
            with open(made / name, "rb") as file:
                os.fsync(file.fileno())
        _swap(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file in one rename; a process killed on the way leaves only a `.tmp` file beside it.

    Missing parents are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def previous(target: Path) -> Path:
    """Where the old folder is if a replacement was cut off between its two renames."""
    return target.with_name(f".{target.name}.previous")


def _swap(made: Path, target: Path) -> None:
    """Put a finished folder in place; whatever happens, the old one or the new one is found."""
    if not target.exists():
        os.rename(made, target)
        return
    before = previous(target)
    shutil.rmtree(before, ignore_errors=True)
    os.rename(target, before)
    try:
        os.rename(made, target)
    except BaseException:
        os.rename(before, target)
        raise
    shutil.rmtree(before, ignore_errors=True)
