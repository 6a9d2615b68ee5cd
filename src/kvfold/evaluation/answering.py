"""One subject's answers to one task: what is there of them, and making those that are wanting.

A pair is a subject and a task. Pairs depend on nothing but themselves, so they may be answered in
any order, by one process or by several side by side (`kvfold.evaluation.side_by_side`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from kvfold.errors import EvaluationError
from kvfold.evaluation.environment import code_state
from kvfold.evaluation.predictions import Predictions
from kvfold.evaluation.tasks.task import Item, Subject, Task
from kvfold.runtime.attach import attach

if TYPE_CHECKING:
    from kvfold.evaluation.suite import Suite

Pair = tuple[str, str]
"""Names of a subject and a task."""


class Watcher(Protocol):
    """Who is told how a run gets on."""

    def progress(self, subject: str, task: str, done: int, total: int) -> None:
        """So many of a pair's items are answered."""

    def say(self, line: str) -> None:
        """Something that a user should know: what is not run again, or run anew, and why."""


class Silent:
    """Nobody is told."""

    def progress(self, subject: str, task: str, done: int, total: int) -> None:
        """Say nothing."""

    def say(self, line: str) -> None:
        """Say nothing."""


def predictions(suite: Suite, folder: Path) -> dict[Pair, Predictions]:
    """The answers of every pair within a run folder, which is not touched."""
    found: dict[Pair, Predictions] = {}
    unanswered, code = suite.unanswered(), code_state()
    for name in suite.subjects:
        described = {"model": suite.described, **suite.describe(name)}
        for task in suite.tasks:
            if task.name not in unanswered.get(name, {}):
                found[name, task.name] = Predictions(
                    folder,
                    name,
                    task.name,
                    {**described, "task": suite.described_tasks[task.name]},
                    [item["id"] for item in suite.items[task.name]],
                    task.chunk,
                    code,
                    list(dict.fromkeys(key for part in task.parts for key in part)),
                )
    return found


class Desk:
    """Where pairs are answered, one after another; a subject stays ready until another is asked.

    Use it as a context: at its end the last subject is put away.
    """

    def __init__(self, suite: Suite, told: Watcher) -> None:
        self.suite, self.told = suite, told
        self._tasks = {task.name: task for task in suite.tasks}
        self._stack = ExitStack()
        self._subject: Subject | None = None

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def answer(self, pair: Pair, found: Predictions, done: int) -> None:
        """Add what is wanting to a pair's answers. done: how many are there already."""
        name, task = pair
        if self._subject is None or self._subject.name != name:
            self._stack.close()
            self._subject = self._stack.enter_context(_ready(self.suite, name, self.told))
        items = self.suite.items[task]
        self.told.progress(name, task, done, len(items))
        _answer(self._subject, self._tasks[task], items, done, found, self.suite.seed, self.told)


def _answer(
    subject: Subject,
    task: Task,
    items: Sequence[Item],
    done: int,
    found: Predictions,
    seed: int,
    told: Watcher,
) -> None:
    for start in range(done, len(items), task.chunk):
        chunk = items[start : start + task.chunk]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_chunk_seed(seed, task.name, start))
            given = list(task.answers(subject, chunk))
        if [answer.item for answer in given] != [item["id"] for item in chunk]:
            raise EvaluationError(
                f"a task must give one answer to each item, in order; {task.name} was asked "
                f"{[item['id'] for item in chunk]} and answered {[a.item for a in given]}"
            )
        found.append(given)
        told.progress(subject.name, task.name, start + len(chunk), len(items))


def _chunk_seed(seed: int, task: str, start: int) -> int:
    """The same for a chunk whether or not those before it were answered in this process."""
    return int.from_bytes(hashlib.sha256(f"{seed} {task} {start}".encode()).digest()[:7], "big")


@contextmanager
def _ready(suite: Suite, name: str, told: Watcher) -> Iterator[Subject]:
    """A subject that can be asked."""
    if name in suite.peers:
        with suite.peers[name].open(suite.model, told.say) as peer:
            yield Subject(name, peer, suite.tokenizer, peer=peer)
        return
    addon = suite.candidates.get(name)
    with nullcontext() if addon is None else attach(suite.model, addon):
        yield Subject(name, suite.model, suite.tokenizer, addon)
