"""Answers of one subject to one task, in a file that grows chunk by chunk and survives a kill.

A line is an answer. Chunks are written whole, in one call, and reach the disk before the next one
is asked for; what a kill left of a chunk is cut off when the file is opened again, and that chunk
is asked anew. The configuration lies beside the answers: answers of another one are moved out of
the way, never added to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvfold.errors import EvaluationError, ReportError
from kvfold.evaluation.configuration import changed_keys, digest
from kvfold.evaluation.report import read_json, write_json
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.tasks.registry import shown_name
from kvfold.evaluation.tasks.task import Answer

PREDICTIONS, REPLACED = "predictions", "replaced"
CONFIGURATION_END = ".config.json"
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
    beside the answers that it made, which stay good when the code changes. Nothing is read or
    written before `open`.
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
    ) -> None:
        self.code = [] if code is None else [dict(code)]
        self.run, self.subject, self.task = run, subject, task
        self.configuration: dict[str, Any] = json.loads(json.dumps(dict(configuration)))
        self.digest = digest(self.configuration)
        self.items, self.chunk = tuple(items), chunk
        self.description = description_path(run, subject, task)
        self.path = _answers_path(self.description)

    @property
    def pair(self) -> str:
        """What messages call it."""
        return f"{shown_name(self.task)} of {self.subject}"

    def open(self, elsewhere: Mapping[str, Path] | None = None) -> tuple[int, str | None]:
        """How many answers are there already, and what a user should be told about them, if so.

        elsewhere: finished answers of other run folders, by digest (see `finished`). Raises
        `EvaluationError` for a damaged file and `ReportError` where nothing can be written.
        """
        said = self._move_others()
        made_by = [] if not self.description.exists() else _codes(self.description)
        if not self.path.exists():
            found = (elsewhere or {}).get(self.digest)
            if found is not None:
                made_by = _codes(description_of(found))
                self._describe(made_by)
                _copy(found, self.path)
                said = f"{self.pair}: answered with the same settings in {found.parents[2]}"
        whole = self._cut()
        if whole == len(self.items) and said is None:
            said = f"{self.pair}: all {whole:,} answers are there, none is asked for again"
        elif 0 < whole < len(self.items):
            said = f"{self.pair}: goes on after {whole:,} of {len(self.items):,} answers"
        if whole and (others := [code for code in made_by if code not in self.code]):
            said = f"{said}; other code made them (commit {others[0]['commit']})"
        if whole < len(self.items):
            kept = made_by if whole else []
            self._describe([*kept, *(code for code in self.code if code not in kept)])
        return whole, said

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
        try:
            with self.path.open("ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ReportError(f"can't write {self.path}: {error.strerror or error}") from error

    def read(self) -> list[Answer]:
        """All whole answers; raises `EvaluationError` naming the line of one that isn't."""
        return [answer for answer, _ in self._lines()]

    def _lines(self) -> list[tuple[Answer, int]]:
        """Every answer that ends in a line break, and where in the file it ends."""
        if not self.path.exists():
            return []
        found: list[tuple[Answer, int]] = []
        end = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            found.append((self._answer(line, number), end))
        if len(found) > len(self.items):
            raise EvaluationError(
                f"{self.path} must have {len(self.items)} answers; it has {len(found)}; delete it"
            )
        return found

    def _answer(self, line: bytes, number: int) -> Answer:
        try:
            data = json.loads(line)
            answer = Answer(data["item"], data["said"], data["scores"])
        except (ValueError, KeyError, TypeError) as error:
            raise EvaluationError(
                f"{self.path}:{number} must be an answer as JSON ({type(error).__name__}: "
                f"{error}); the file is damaged; delete it, and its answers are made anew"
            ) from None
        if number <= len(self.items) and answer.item != self.items[number - 1]:
            raise EvaluationError(
                f"{self.path}:{number} must answer item {self.items[number - 1]!r}; it answers "
                f"{answer.item!r}; the file was edited; delete it, and its answers are made anew"
            )
        return answer

    def _cut(self) -> int:
        """Cut off what a kill left of a chunk; how many answers stay."""
        lines = self._lines()
        whole = len(lines)
        if whole < len(self.items):
            whole -= whole % self.chunk
        end = lines[whole - 1][1] if whole else 0
        if self.path.exists() and self.path.stat().st_size > end:
            os.truncate(self.path, end)
        return whole

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
        """Move answers of another configuration out of the way; say what differs and where."""
        old = read_description(self.description) if self.description.exists() else None
        if old is None and not self.path.exists():
            return None
        if old is not None and (old["digest"], old["subject"]) == (self.digest, self.subject):
            return None
        name = "unknown" if old is None else old["digest"][:12]
        place = self.run / REPLACED / name / self.path.parent.name
        place.mkdir(parents=True, exist_ok=True)
        for path in (self.path, self.description):
            if path.exists():
                path.replace(place / path.name)
        changed = [] if old is None else changed_keys(old["configuration"], self.configuration)
        reason = "; ".join(changed) or "no configuration lay beside it"
        return (
            f"{self.pair}: answered anew, since its settings changed ({reason}); "
            f"the old answers are in {place}"
        )


def read_description(path: Path) -> dict[str, Any]:
    """The configuration file of some answers; raises `EvaluationError`."""
    data = read_json(path)
    missing = [key for key in ("subject", "digest", "items", "configuration") if key not in data]
    if missing:
        raise EvaluationError(
            f"{path} must be the description of answers as kvfold writes it; it lacks "
            f"{', '.join(missing)}; delete it and the answers beside it"
        )
    return data


def description_path(run: Path, subject: str, task: str) -> Path:
    """Where a run folder has the description of a subject's answers to a task."""
    return run / PREDICTIONS / safe_name(subject) / f"{safe_name(task)}{CONFIGURATION_END}"


def description_of(answers: Path) -> Path:
    """The description that lies beside a file of answers."""
    return answers.with_name(f"{answers.stem}{CONFIGURATION_END}")


def _answers_path(description: Path) -> Path:
    return description.with_name(f"{description.name.removesuffix(CONFIGURATION_END)}.jsonl")


def _codes(description: Path) -> list[dict[str, Any]]:
    """The states of the code that made some answers, as far as they are known."""
    found: list[dict[str, Any]] = read_description(description).get("code", [])
    return found


def finished(root: Path) -> dict[str, Path]:
    """Files of answers, by digest, that are complete, in all run folders under a root."""
    found: dict[str, Path] = {}
    for description in sorted(root.rglob(f"*{CONFIGURATION_END}")):
        answers = _answers_path(description)
        if not answers.exists():
            continue
        data = read_description(description)
        if answers.read_bytes().count(b"\n") == data["items"]:
            found.setdefault(data["digest"], answers)
    return found


def _copy(source: Path, target: Path) -> None:
    """Copy whole or not at all."""
    beside = target.with_name(f".{target.name}.copied")
    try:
        shutil.copyfile(source, beside)
        beside.replace(target)
    except OSError as error:
        raise ReportError(f"can't write {target}: {error.strerror or error}") from error
