"""The log of a training: a line of JSON for each thing that happened, there as soon as it did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from kvfold.errors import ReportError

Log = Callable[[dict[str, Any]], None]
"""What takes each line of a training's log: a mapping of plain data."""


class JsonLines:
    """A log in a file, or none if path is None. Use as a context manager.

    go_on: add to a log that is there instead of beginning anew. Raises `ReportError` where nothing
    can be written.
    """

    def __init__(self, path: Path | None, *, go_on: bool = False) -> None:
        self.path = path
        self._file: IO[str] | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if go_on and path.exists():
                    _drop_torn_line(path)
                self._file = path.open("a" if go_on else "w", encoding="utf-8")
            except OSError as error:
                raise ReportError(f"can't write the log {path}: {error.strerror}") from error

    def write(self, line: dict[str, Any]) -> None:
        """Add a line and flush it."""
        if self._file is not None:
            self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()


def _plain(value: Any) -> Any:
    """The value with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_torn_line(path: Path) -> None:
    """Cut off what a run that was killed had begun to write."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
