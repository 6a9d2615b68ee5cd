"""Where a store keeps its files: a folder of this machine, or any URL that fsspec knows.

A store touches its own files only: regular ones whose name it could have given (`Owns`). Whatever
else lies beside them is neither counted nor read nor dropped; what lies under a name that the
store needs is moved aside.

Both keep to a budget of bytes by dropping what was used longest ago. A local folder has a lock, so
that processes that share it count right; a reader needs none, since files appear and vanish whole.
A remote one has no lock: two writers at once may drop a file too many, never damage one.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvfold.errors import MissingExtraError, SnapshotError
from kvfold.store.folder import write_file

SUFFIX = ".kvfold"
MARK = ".used-"
ASIDE = ".aside-"

Owns = Callable[[str], bool]
"""Whether a name, without suffix, is of the store's own form."""

log = logging.getLogger(__name__)


def any_name(_: str) -> bool:
    """A place of which every name is the store's own."""
    return True


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

    @abstractmethod
    def check_writable(self) -> None:
        """Make the folder if there is none, and raise `SnapshotError` if it takes no files."""


def place_at(where: str | Path, owns: Owns = any_name) -> Place:
    """A local folder, or what an fsspec URL (`s3://bucket/folder`) names.

    owns: which names are the store's own.
    """
    text = str(where)
    return RemotePlace(text, owns) if "://" in text else LocalPlace(Path(text), owns)


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

    def __init__(self, folder: Path, owns: Owns = any_name) -> None:
        self.folder = folder.expanduser().absolute()
        self.owns = owns
        if self.folder.exists() and not self.folder.is_dir():
            raise SnapshotError(f"a store of snapshots is a folder; {folder} is a file")

    def entries(self) -> list[Entry]:
        """All files, in no order."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            name = path.name.removesuffix(SUFFIX)
            held = _regular(path) if self.owns(name) else None
            if held is not None:
                found.append(Entry(name, held.st_size, held.st_mtime_ns))
        return found

    def path(self, name: str) -> Path:
        """Where a file lies."""
        return self.folder / f"{name}{SUFFIX}"

    def read(self, name: str) -> bytes | None:
        """A file's content, None if there is none."""
        path = self.path(name)
        try:
            return path.read_bytes() if _regular(path) is not None else None
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes, max_bytes: int) -> None:
        """Write a file, under the lock; what killed writers left is cleared away first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            for left in self._left():
                left.unlink(missing_ok=True)
            self._clear(self.path(name))
            others = [entry for entry in self.entries() if entry.name != name]
            for entry in doomed(others, max_bytes - len(content)):
                self.remove(entry.name)
            write_file(self.path(name), content)
            self.touch(name)

    def _left(self) -> Iterator[Path]:
        """Files half written: whoever wrote one had the lock, and is gone."""
        for path in self.folder.glob(f".*{SUFFIX}.*.tmp"):
            name = path.name[1:].rpartition(f"{SUFFIX}.")[0]
            if self.owns(name) and _regular(path) is not None:
                yield path

    def _clear(self, path: Path) -> None:
        """Move away what lies under a file's name and is none; it is not the store's to drop."""
        if os.path.lexists(path) and _regular(path) is None:
            aside = path.with_name(f"{path.name}{ASIDE}{time.time_ns()}")
            os.rename(path, aside)
            log.warning("%s is no file, and was moved aside as %s", path, aside.name)

    def check_writable(self) -> None:
        """See `Place`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder), FileLock(self.folder / ".lock"):
                pass
        except OSError as error:
            raise _unusable(self.folder, error) from error

    def touch(self, name: str) -> None:
        """Note that a file was used now."""
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

    def __init__(self, url: str, owns: Owns = any_name) -> None:
        self.system, self.folder = _filesystem(url)
        self.owns = owns
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
            if item.get("type", "file") != "file":
                continue
            name, marked, when = file.partition(MARK)
            if marked and when.isdecimal():
                used.setdefault(name, []).append(int(when))
            elif file.endswith(SUFFIX) and self.owns(file.removesuffix(SUFFIX)):
                sizes[file.removesuffix(SUFFIX)] = int(item["size"] or 0)
        return sizes, used

    def check_writable(self) -> None:
        """See `Place`."""
        probe = f"{self.folder}/.probe-{time.time_ns()}"
        try:
            self.system.makedirs(self.folder, exist_ok=True)
            self.system.pipe_file(probe, b"")
            self.system.rm_file(probe)
        except Exception as error:  # each kind of URL has its own
            raise _unusable(self.folder, error) from error

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


def _regular(path: Path) -> os.stat_result | None:
    """What is known of a regular file; None for anything else, links included, or nothing."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _unusable(folder: Path | str, error: Exception) -> SnapshotError:
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    if isinstance(error, FileExistsError):
        reason = "a file or a link to nothing is in its place"
    return SnapshotError(
        f"a store is a folder that files can be written to; {folder} is not ({reason}); make it "
        "one, or name another"
    )


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
