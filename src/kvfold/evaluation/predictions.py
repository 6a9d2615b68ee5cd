"""Answers of one subject to one task, in a file that grows chunk by chunk and survives a kill.

A line is an answer. Chunks are written whole, in one call, and reach the disk before the next one
is asked for; what a kill left of a chunk is cut off when the file is opened again, and that chunk
is asked anew. The configuration lies beside the answers: answers of another one are moved out of
the way, never added to, and taken back when they are asked for again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvfold.errors import EvaluationError, KvfoldError, ReportError
from kvfold.evaluation.answer_files import (
    CONFIGURATION_END,
    answers_of,
    codes,
    description_of,
    read_answers,
    read_description,
)
from kvfold.evaluation.configuration import changed_keys, digest
from kvfold.evaluation.report import write_atomically, write_json
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.tasks.registry import shown_name
from kvfold.evaluation.tasks.task import Answer

PREDICTIONS, REPLACED = "predictions", "replaced"
PLAIN_FOLDER = "plain"
LONGEST = 80
WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def safe_name(name: str) -> str:
    """A file name for anything's name, unlike every other's on every usual file system.

    Lower-case letters, digits, dot, dash and underscore stay; a name that had something else (or
    is too long, or means something to a file system) gets some of its digest at the end.
    """
    if name == PLAIN:
        return PLAIN_FOLDER
    kept = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:LONGEST].strip(".") or "_"
    special = name == PLAIN_FOLDER or WINDOWS_DEVICES.fullmatch(kept.lower())
    if kept == name and kept == kept.lower() and not special:
        return kept
    return f"{kept}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class Predictions:
    """The answers of a subject to a task within a run folder.

    configuration: all that they depend on, as plain data. items: ids, in order. chunk: answers
    that belong together. code: which state of the code answers (`environment.code_state`); it lies
    beside the answers that it made, which stay good when the code changes. keys: what each answer
    must say of itself. Nothing is read or written before `open`.
    """

    def __init__(
        self,
        run: Path,
        subject: str,
        task: str,
        configuration: Mapping[str, Any],
        items: Sequence[str],
        chunk: int,
        code: Mapping[str, Any] | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        self.keys = tuple(keys)
        self.code = [] if code is None else [dict(code)]
        self.run, self.subject, self.task = run, subject, task
        self.configuration: dict[str, Any] = json.loads(json.dumps(dict(configuration)))
        self.digest = digest(self.configuration)
        self.items, self.chunk = tuple(items), chunk
        self.description = description_path(run, subject, task)
        self.path = answers_of(self.description)

    @property
    def pair(self) -> str:
        """What messages call it."""
        return f"{shown_name(self.task)} of {self.subject}"

    def open(self, elsewhere: Mapping[str, Sequence[Path]] | None = None) -> tuple[int, str | None]:
        """How many answers are there already, and what a user should be told about them, if so.

        elsewhere: finished answers of other run folders, by digest (see `finished`). Answers of
        the same configuration that were moved out of the way in this folder are taken back. Raises
        `EvaluationError` for a damaged file and `ReportError` where nothing can be written.
        """
        moved = self._move_others()
        made_by = codes(self.description) if self.description.exists() else []
        told: list[str] = []
        whole, taken = self._cut(), False
        if whole < len(self.items):
            source, passed = self._most((elsewhere or {}).get(self.digest, ()), whole)
            told += passed
            if source is not None:
                made_by = codes(description_of(source))
                told.append(self._take(source, made_by))
                whole, taken = self._cut(), True
        if moved is not None:
            told.insert(0, moved if taken else f"answered anew, since {moved}")
        if whole == len(self.items) and not taken:
            told.append(f"all {whole:,} answers are there, none is asked for again")
        elif 0 < whole < len(self.items):
            told.append(f"goes on after {whole:,} of {len(self.items):,} answers")
        if whole and (others := [code for code in made_by if code not in self.code]):
            told.append(f"other code made them (commit {others[0]['commit']})")
        if whole < len(self.items):
            kept = made_by if whole else []
            self._describe([*kept, *(code for code in self.code if code not in kept)])
        return whole, f"{self.pair}: {'; '.join(told)}" if told else None

    def append(self, answers: Sequence[Answer]) -> None:
        """Write a chunk to the disk; raises `EvaluationError` for what isn't plain data."""
        try:
            text = "".join(json.dumps(a.to_dict(), allow_nan=False) + "\n" for a in answers)
        except (TypeError, ValueError) as error:
            raise EvaluationError(
                f"answers must be plain data with finite numbers; {error}, in one of "
                f"{answers[0].item!r} to {answers[-1].item!r} of {self.pair}; if the model's "
                "activations overflow, load it in float32 or bfloat16"
            ) from None
        with _files(self.path), self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Answer]:
        """All whole answers; raises `EvaluationError` naming the line of one that isn't."""
        return [answer for answer, _ in self._lines(self.path)]

    def _lines(self, path: Path) -> list[tuple[Answer, int]]:
        return read_answers(path, self.items, self.keys)

    def _whole(self, lines: Sequence[tuple[Answer, int]]) -> int:
        """How many of a file's answers stay: a chunk that a kill left a part of goes."""
        count = len(lines)
        return count if count == len(self.items) else count - count % self.chunk

    def _cut(self) -> int:
        """Cut off what a kill left of a chunk; how many answers stay."""
        lines = self._lines(self.path)
        whole = self._whole(lines)
        end = lines[whole - 1][1] if whole else 0
        with _files(self.path):
            if self.path.exists() and self.path.stat().st_size > end:
                os.truncate(self.path, end)
        return whole

    def _most(self, elsewhere: Sequence[Path], whole: int) -> tuple[Path | None, list[str]]:
        """Which file made before has most answers, and more than are here; what can't be used.

        elsewhere: finished files of other run folders. Of equals this run folder's own is taken.
        """
        best, passed = None, []
        own = (self.run / REPLACED).glob(f"{self.digest[:12]}*/*/{self.path.name}")
        for source in (*sorted(own), *elsewhere):
            try:
                if read_description(description_of(source))["digest"] != self.digest:
                    continue
                found = self._whole(self._lines(source))
            except EvaluationError as error:
                passed.append(f"not used: {error}")
                continue
            if found > whole:
                best, whole = source, found
        return best, passed

    def _take(self, source: Path, made_by: Sequence[Mapping[str, Any]]) -> str:
        """Copy answers here; those of this subject that were moved out of the way are moved back.

        made_by: the code of these answers. What is here of the same configuration are the first of
        them.
        """
        with _files(source):
            content = source.read_bytes()
        self._describe(made_by)
        write_atomically(self.path, content)
        aside = source.is_relative_to(self.run / REPLACED)
        if not aside:
            return f"answered with the same settings in {source.parents[2]}"
        if source.parent.name == self.path.parent.name:
            with _files(source):
                source.unlink()
                description_of(source).unlink()
            with suppress(OSError):  # others' answers may lie there too
                source.parent.rmdir()
                source.parents[1].rmdir()
        return f"answered with the same settings before; taken back from {source.parent}"

    def _describe(self, code: Sequence[Mapping[str, Any]]) -> None:
        write_json(
            self.description,
            {
                "subject": self.subject,
                "digest": self.digest,
                "items": len(self.items),
                "code": list(code),
                "configuration": self.configuration,
            },
        )

    def _move_others(self) -> str | None:
        """Move answers of another configuration out of the way; say what differs and where.

        Their description is there before them and goes from here after them, so that a kill in
        between leaves them beside it.
        """
        with _files(self.path):
            if not self.path.exists():
                return None  # a description without answers is written anew
            old = read_description(self.description) if self.description.exists() else None
        if old is not None and (old["digest"], old["subject"]) == (self.digest, self.subject):
            return None
        place = self._free("unknown" if old is None else old["digest"][:12])
        with _files(place):
            place.mkdir(parents=True, exist_ok=True)
            if old is not None:
                write_json(place / self.description.name, old)
            self.path.replace(place / self.path.name)
            self.description.unlink(missing_ok=True)
        changed = [] if old is None else changed_keys(old["configuration"], self.configuration)
        reason = "; ".join(changed) or "no configuration lay beside it"
        return f"its settings changed ({reason}); the old answers are in {place}"

    def _free(self, name: str) -> Path:
        """A folder that these answers can be moved to, where none are overwritten."""
        for number in itertools.count(1):
            numbered = name if number == 1 else f"{name}-{number}"
            place = self.run / REPLACED / numbered / self.path.parent.name
            if not (place / self.path.name).exists():
                break
        return place


def description_path(run: Path, subject: str, task: str) -> Path:
    """Where a run folder has the description of a subject's answers to a task."""
    return run / PREDICTIONS / safe_name(subject) / f"{safe_name(task)}{CONFIGURATION_END}"


@contextmanager
def _files(path: Path) -> Iterator[None]:
    """Turn what a file system refuses into `ReportError`."""
    try:
        yield
    except KvfoldError:
        raise
    except OSError as error:
        raise ReportError(f"can't read or write {path}: {error.strerror or error}") from error
