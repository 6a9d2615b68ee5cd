"""Data files of the tasks: where they are, what is in them, and which bytes were read.

A score belongs to a text, so every file comes with its digest, which goes into the task's settings.
What is wrong with a file is told with its name and line: people bring their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks.settings import TaskSettings

DATA_VARIABLE = "KVFOLD_DATA"
"""Names the folder of data sets where the settings name none."""


@dataclass(frozen=True)
class DataFile:
    """A text file that was read. name: its path's end, which tells it to a reader."""

    name: str
    sha256: str
    path: Path
    text: str

    def to_dict(self) -> dict[str, str]:
        """What a task's settings say of it: the same wherever the file lies."""
        return {"name": self.name, "sha256": self.sha256}


def data_file(settings: TaskSettings, name: str) -> DataFile:
    """A task's file: `name` in the folder of data sets, or the one file that is named instead.

    Raises `EvaluationError` where no folder is named, and as `read_file` does.
    """
    folder = named_data(settings)
    if folder is None:
        raise EvaluationError(
            f"this task needs {name} in a folder of data sets; none was named; name it with "
            f"--data FOLDER or {DATA_VARIABLE}, or name one file of your own"
        )
    if folder.is_file():
        return read_file(folder, folder.name)
    return read_file(folder / name, name)


def several_files(settings: TaskSettings, names: Sequence[str]) -> list[DataFile]:
    """A task's several files of the folder of data sets.

    Raises `EvaluationError` where one file is named in its place, and as `data_file` does.
    """
    folder = named_data(settings)
    if folder is not None and folder.is_file():
        raise several_needed(folder, names)
    return [data_file(settings, name) for name in names]


def several_needed(file: Path, names: Sequence[str]) -> EvaluationError:
    """The error for one file that is named where a task has several."""
    return EvaluationError(
        f"this task needs {len(names)} files, {', '.join(names)}, in a folder of data sets; got "
        f"the one file {file}; name the folder"
    )


def named_data(settings: TaskSettings) -> Path | None:
    """The folder of data sets, or the one file, that the settings name or else KVFOLD_DATA does."""
    if settings.data is not None:
        return settings.data
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else None


def read_file(path: Path, name: str) -> DataFile:
    """A UTF-8 text file, its lines ended by \\n whatever they end with in the file.

    Raises `EvaluationError` naming the file (and the line) where it is missing, unreadable, empty
    or no UTF-8 text.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EvaluationError(
            f"a data file must be readable; {path}: {error.strerror}; check the path"
        ) from None
    if b"\0" in data:
        line = 1 + data[: data.index(b"\0")].count(b"\n")
        raise EvaluationError(
            f"a data file must be text; {path}:{line} holds a zero byte; name a text file, or "
            "convert it to UTF-8"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + data[: error.start].count(b"\n")
        raise EvaluationError(
            f"a data file must be UTF-8 text; {path}:{line} is not; convert it to UTF-8"
        ) from None
    if not text.strip():
        raise EvaluationError(f"a data file must have text in it; {path} is empty; name another")
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return DataFile(name, hashlib.sha256(data).hexdigest(), path, lines)


def lines_of(file: DataFile) -> list[tuple[int, str]]:
    """Lines that are not blank, each with its number from 1."""
    lines = enumerate(file.text.split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]
