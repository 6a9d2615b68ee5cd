"""One process at a time in a folder: a lock in it that is free again when its process has died."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kvfold.errors import FolderError, KvfoldError


@contextmanager
def alone_in(folder: Path, lock_file: str, refusal: KvfoldError) -> Iterator[None]:
    """Hold a folder that is there; raises `refusal` at once while another process does.

    lock_file: the lock's name in the folder, which stays there. Raises `FolderError` where it
    can't be written.
    """
    lock = FileLock(folder / lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise refusal from None
    except OSError as error:
        raise FolderError(
            f"a folder is held by a lock file in it; {folder / lock_file} can't be written: "
            f"{error.strerror or error}; name a folder that can be written"
        ) from None
    try:
        yield
    finally:
        lock.release()
