"""Records of a data file in JSON lines, each checked before anything is run on them.

A file that is not what it should be is refused by the number of its first bad line: a long run
must not end at item 300 because of a comma.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.errors import EvaluationError

Complaint = Callable[[Mapping[str, Any]], str | None]
"""Says what a record must have besides its fields, or None if it has it."""

_IN_WORDS = {str: "a string", int: "a whole number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Record:
    """One line. where: `path:line`, for messages. data: its fields."""

    where: str
    data: Mapping[str, Any]


def read_records(
    path: str | Path,
    fields: Mapping[str, type],
    *,
    what: str,
    count: int | None = None,
    complaint: Complaint | None = None,
) -> list[Record]:
    """Records of a JSON-lines file in UTF-8, at most `count` from its start; blank lines are none.

    fields: names that each record must have, and their types. what: one of them in words, for
    messages. Raises `EvaluationError`, naming the line, for one that is not so, and for a file
    that is missing or empty.
    """
    records: list[Record] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if count is not None and len(records) >= count:
                    break
                if line.strip():
                    records.append(_record(line, f"{path}:{number}", fields, complaint))
    except OSError as error:
        raise EvaluationError(
            f"{what}s come from a JSON-lines file in UTF-8; {path} can't be read: {error.strerror}"
        ) from None
    if not records:
        raise EvaluationError(f"{path} must have at least one {what}; it has none")
    return records


def file_digest(path: str | Path) -> str:
    """SHA-256 of a data file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record(
    line: bytes, where: str, fields: Mapping[str, type], complaint: Complaint | None
) -> Record:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvaluationError(
            f"{where} must be text in UTF-8; byte {error.start} of the line is "
            f"0x{line[error.start]:02x}; save the file as UTF-8"
        ) from None
    try:
        data = json.loads(text)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        # JSON can write half of a pair as \ud800, which is no character.
        raise EvaluationError(
            f"{where} must be a JSON object of texts that UTF-8 can write; it has "
            f"{error.object[error.start]!a} without the other half; write the whole character"
        ) from None
    except ValueError as error:
        raise EvaluationError(f"{where} must be a JSON object; {error}") from None
    except RecursionError:
        raise EvaluationError(
            f"{where} must be a JSON object; it is nested too deeply; write it flatter"
        ) from None
    if not isinstance(data, dict):
        raise EvaluationError(f"{where} must be a JSON object; got {_short(data)}")
    for name, kind in fields.items():
        if name not in data:
            raise EvaluationError(
                f"{where} must be a JSON object with {' and '.join(fields)}; {name} is missing"
            )
        if not isinstance(data[name], kind):
            raise EvaluationError(
                f"{where} must be a JSON object whose {name} is {_IN_WORDS[kind]}; "
                f"got {_short(data[name])}"
            )
    wrong = None if complaint is None else complaint(data)
    if wrong is not None:
        raise EvaluationError(f"{where} {wrong}")
    return Record(where, data)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
