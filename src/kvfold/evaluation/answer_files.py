"""Files of answers as they lie in run folders: reading them, and finding those made before.

Nothing here writes. What another run folder holds is only looked at: a damaged file there is told
and passed over, since the answers can be made anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvfold.errors import EvaluationError
from kvfold.evaluation.report import read_json
from kvfold.evaluation.shapes import AnswerShape, DescriptionShape, check_shape
from kvfold.evaluation.tasks.task import Answer

CONFIGURATION_END = ".config.json"
ANEW = "the file is damaged; delete it, and its answers are made anew"


def description_of(answers: Path) -> Path:
    """The description that lies beside a file of answers."""
    return answers.with_name(f"{answers.stem}{CONFIGURATION_END}")


def answers_of(description: Path) -> Path:
    """The file of answers that a description lies beside."""
    return description.with_name(f"{description.name.removesuffix(CONFIGURATION_END)}.jsonl")


def read_description(path: Path) -> dict[str, Any]:
    """The configuration file of some answers; raises `EvaluationError`."""
    data = read_json(path)
    check_shape(data, DescriptionShape, path, "delete it and the answers beside it")
    return data


def codes(description: Path) -> list[dict[str, Any]]:
    """The states of the code that made some answers, as far as they are known."""
    found: list[dict[str, Any]] = read_description(description).get("code", [])
    return found


def read_answers(path: Path, items: Sequence[str], keys: Sequence[str]) -> list[tuple[Answer, int]]:
    """Every answer that ends in a line break, and where in the file it ends; none without a file.

    items: ids, in order. keys: what each answer must say of itself. Raises `EvaluationError`,
    naming the line of an answer that isn't one.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EvaluationError(
            f"{path} must be a file of answers that can be read; {error.strerror}; move it away, "
            "and its answers are made anew"
        ) from None
    found: list[tuple[Answer, int]] = []
    end = 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        found.append((_answer(line, f"{path}:{number}", items[number - 1 : number], keys), end))
    if len(found) > len(items):
        raise EvaluationError(
            f"{path} must have {len(items)} answers; it has {len(found)}; delete it"
        )
    return found


def finished(root: Path, say: Callable[[str], None]) -> dict[str, list[Path]]:
    """Files of answers, by digest, that are complete, in all run folders under a root.

    say: is told of descriptions and answers that can't be read, which are passed over. Raises
    `EvaluationError` where the root is no folder.
    """
    check_reuse(root)
    found: dict[str, list[Path]] = {}
    for description in sorted(root.rglob(f"*{CONFIGURATION_END}")):
        answers = answers_of(description)
        if not answers.exists():
            continue
        try:
            data = read_description(description)
            complete = answers.read_bytes().count(b"\n") == data["items"]
        except EvaluationError as error:
            say(f"not used: {error}")
        except OSError as error:
            say(f"not used: {answers} can't be read: {error.strerror}")
        else:
            if complete:
                found.setdefault(data["digest"], []).append(answers)
    return found


def check_reuse(root: Path) -> None:
    """Raise `EvaluationError` unless answers can be looked for in a folder."""
    if not os.path.isdir(root):  # a name too long is not there
        what = "a file" if os.path.exists(root) else "not there"
        raise EvaluationError(
            f"--reuse names a folder of run folders; {root} is {what}; name another, or leave it "
            "out"
        )


def _answer(line: bytes, where: str, expected: Sequence[str], keys: Sequence[str]) -> Answer:
    """One line. expected: the id of the item, none if there are more lines than items."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{where} must be an answer as JSON; {error}; {ANEW}") from None
    check_shape(data, AnswerShape, where, ANEW)
    answer = Answer(data["item"], data["said"], data["scores"])
    if expected and answer.item != expected[0]:
        raise EvaluationError(
            f"{where} must answer item {expected[0]!r}; it answers {answer.item!r}; the file was "
            "edited; delete it, and its answers are made anew"
        )
    wanting = [key for key in keys if key not in answer.said]
    if wanting:
        raise EvaluationError(
            f"{where} must be an answer that says its {', '.join(keys)}; {', '.join(wanting)} is "
            f"missing; {ANEW}"
        )
    return answer
