"""Where a store keeps its files: a folder of this machine, or any URL that fsspec knows.

Both keep to a budget of bytes by dropping what was used longest ago. A local folder has a lock, so
that processes that share it count right; a reader needs none, since files appear and vanish whole.
A remote one has no lock: two writers at once may drop a file too many, never damage one.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvfold.errors import MissingExtraError, SnapshotError
from kvfold.store.folder import write_file

SUFFIX = ".kvfold"
MARK = ".used-"


@dataclass(frozen=True)
class Entry:
    """One file: its name without suffix, bytes, and when it was last used in ns since 1970."""

    name: str
    size: int
    used: int


class Place(ABC):
    """Files by name. A file that is gone is no error: others may drop it at any time."""

    @abstractmethod
    def entries(self) -> list[Entry]:
        """All files, in no order."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """A file's content, None if there is none."""

    @abstractmethod
    def write(self, name: str, content: bytes, max_bytes: int) -> None:
        """Write a file whole or not at all, having dropped what the budget has no room for."""

    @abstractmethod
    def touch(self, name: str) -> None:
        """Note that a file was used now."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Drop a file."""


def place_at(where: str | Path) -> Place:
    """A local folder, or what an fsspec URL (`s3://bucket/folder`) names."""
    text = str(where)
    return RemotePlace(text) if "://" in text else LocalPlace(Path(text))


def doomed(entries: Sequence[Entry], room: int) -> list[Entry]:
    """Which files must go for the rest to take at most `room` bytes: used longest ago first."""
    total = sum(entry.size for entry in entries)
    gone = []
    for entry in sorted(entries, key=lambda entry: (entry.used, entry.name)):
        if total <= room:
            break
        gone.append(entry)
        total -= entry.size
    return gone


class LocalPlace(Place):
    """A folder. A file's time of change is when it was last used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise SnapshotError(f"a store of snapshots is a folder; {folder} is a file")

    def entries(self) -> list[Entry]:
        """All files, in no order."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append(Entry(path.name.removesuffix(SUFFIX), stat.st_size, stat.st_mtime_ns))
        return found

    def path(self, name: str) -> Path:
        """Where a file lies."""
        return self.folder / f"{name}{SUFFIX}"

    def read(self, name: str) -> bytes | None:
        """A file's content, None if there is none."""
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes, max_bytes: int) -> None:
        """Write a file, under the lock; what killed writers left is cleared away first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            for left in self.folder.glob(".*.tmp"):  # whoever wrote it had the lock, and is gone
                left.unlink(missing_ok=True)
            others = [entry for entry in self.entries() if entry.name != name]
            for entry in doomed(others, max_bytes - len(content)):
                self.remove(entry.name)
            write_file(self.path(name), content)
            self.touch(name)

    def touch(self, name: str) -> None:
        """Note that a file was used now."""
        import os

        now = time.time_ns()
        try:
            os.utime(self.path(name), ns=(now, now))
        except FileNotFoundError:
            return

    def remove(self, name: str) -> None:
        """Drop a file."""
        self.path(name).unlink(missing_ok=True)


class RemotePlace(Place):
    """A folder of an fsspec filesystem. Times of use are in the names of empty files beside."""

    def __init__(self, url: str) -> None:
        self.system, self.folder = _filesystem(url)
        self._lock = threading.Lock()

    def entries(self) -> list[Entry]:
        """All files, in no order."""
        sizes, used = self._listing()
        return [Entry(name, size, max(used.get(name, [0]))) for name, size in sizes.items()]

    def _listing(self) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Bytes of each file, and the times that were noted of it."""
        sizes: dict[str, int] = {}
        used: dict[str, list[int]] = {}
        self.system.invalidate_cache()
        try:
            found = self.system.ls(self.folder, detail=True)
        except FileNotFoundError:
            return sizes, used
        for item in found:
            file = str(item["name"]).rsplit("/", 1)[-1]
            name, marked, when = file.partition(MARK)
            if marked and when.isdecimal():
                used.setdefault(name, []).append(int(when))
            elif file.endswith(SUFFIX):
                sizes[file.removesuffix(SUFFIX)] = int(item["size"] or 0)
        return sizes, used

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}{SUFFIX}"

    def read(self, name: str) -> bytes | None:
        """A file's content, None if there is none."""
        try:
            content: bytes = self.system.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes, max_bytes: int) -> None:
        """Write a file. Object stores show it whole or not at all; elsewhere its checksum tells."""
        with self._lock:
            self.system.makedirs(self.folder, exist_ok=True)
            others = [entry for entry in self.entries() if entry.name != name]
            for entry in doomed(others, max_bytes - len(content)):
                self.remove(entry.name)
            self.system.pipe_file(self._path(name), content)
            self.touch(name)

    def touch(self, name: str) -> None:
        """Note that a file was used now."""
        before = self._listing()[1].get(name, [])
        self.system.pipe_file(f"{self.folder}/{name}{MARK}{time.time_ns()}", b"")
        for when in before:
            self._drop(f"{self.folder}/{name}{MARK}{when}")

    def remove(self, name: str) -> None:
        """Drop a file."""
        self._drop(self._path(name))
        for when in self._listing()[1].get(name, []):
            self._drop(f"{self.folder}/{name}{MARK}{when}")

    def _drop(self, path: str) -> None:
        try:
            self.system.rm_file(path)
        except FileNotFoundError:
            return


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingExtraError(
            f"to keep snapshots at {url} takes the `fsspec` package; install it with "
            "pip install 'kvfold[remote]', and what fsspec needs for this kind of URL"
        ) from None
    try:
        system, folder = url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise SnapshotError(
            f"a store is a folder or a URL that fsspec can open; {url} is not ({error}); check its "
            "spelling, or install what fsspec names"
        ) from error
    return system, str(folder).rstrip("/")
