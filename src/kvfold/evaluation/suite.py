"""One run of the evaluation suite: subjects answer tasks, into a folder from which a run goes on.

    run.json        what was asked for, by whom (machine, versions, commit), with what seed
    predictions/    <subject>/<task>.jsonl, an answer a line; all figures are made of these
    metrics.json    the figures; the same bytes however often the run was broken off
    cost.json       bytes, memory and time; times differ from run to run, so they lie apart

The plain model is always a subject, the first: every other is compared with it, item by item.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout

from kvfold.errors import EvaluationError, ReportError
from kvfold.evaluation.configuration import describe_addon, describe_model, describe_task
from kvfold.evaluation.metrics import FORMAT, task_figures
from kvfold.evaluation.peers.peer import Peer
from kvfold.evaluation.predictions import Predictions, finished
from kvfold.evaluation.report import write_json
from kvfold.evaluation.run_file import write_run_file
from kvfold.evaluation.runner import PLAIN, check_names
from kvfold.evaluation.tasks.task import Answer, Item, Subject, Task
from kvfold.runtime.attach import AddOnLike, attach

METRICS_FILE = "metrics.json"
LOCK_FILE = ".lock"


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


@dataclass(frozen=True)
class Suite:
    """Who is asked what.

    candidates: add-ons by name; the plain model comes first without being named. seed: of what
    answering and resampling draw; tasks have their own in their settings. config: what the caller
    chose, for `run.json` only. peers: other projects' methods by name, asked last.
    """

    model: Any
    tokenizer: Any
    candidates: Mapping[str, AddOnLike]
    tasks: Sequence[Task]
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    peers: Mapping[str, Peer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names(self.candidates, ())
        both = sorted(set(self.candidates) & set(self.peers))
        if both:
            raise EvaluationError(
                f"subjects must have different names; {', '.join(both)} is an add-on and a peer; "
                "rename the add-on's folder"
            )
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names) or not names:
            raise EvaluationError(f"a suite needs tasks, each once; got {names}")
        for addon in self.candidates.values():
            addon.check_base(self.model)

    @cached_property
    def described(self) -> dict[str, Any]:
        """The plain model as plain data (`describe_model`): all its weights are read for it, once.

        So it must not change while the suite is used.
        """
        return describe_model(self.model, self.tokenizer)

    @property
    def subjects(self) -> list[str]:
        """All names, the plain model's first."""
        return [PLAIN, *self.candidates, *self.peers]

    def describe(self, subject: str) -> dict[str, Any]:
        """What a subject's answers depend on beside the model."""
        if subject in self.peers:
            return {"addon": None, "peer": self.peers[subject].describe()}
        return {"addon": describe_addon(self.candidates.get(subject))}

    def unanswered(self) -> dict[str, dict[str, str]]:
        """By peer and task, why a peer is not asked."""
        why = {task.name: task.not_for_peers for task in self.tasks} if self.peers else {}
        reasons = {name: reason for name, reason in why.items() if reason is not None}
        return {name: dict(reasons) for name in self.peers} if reasons else {}


def run_suite(
    suite: Suite,
    folder: Path,
    *,
    reuse: Path | None = None,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Answer what is not answered yet, write the figures, and return them as plain data.

    folder: of this run; what is there of the same settings is kept, answers of other settings are
    moved to `replaced/` and made anew. reuse: a folder of run folders whose finished answers of
    the same settings are copied. Raises `EvaluationError` for another process in the same folder,
    damaged files, and answers that can't be judged; `ReportError` where nothing can be written.
    """
    with _alone_in(folder):
        told = watcher or Silent()
        items = {task.name: _items(task) for task in suite.tasks}
        model = suite.described
        tasks = {task.name: describe_task(task, suite.seed) for task in suite.tasks}
        peers = {name: peer.describe() for name, peer in suite.peers.items()}
        subjects = suite.subjects
        write_run_file(folder, suite.config, model, tasks, subjects, suite.seed, peers)
        (folder / METRICS_FILE).unlink(missing_ok=True)  # of an earlier run, till this one is done
        elsewhere = finished(reuse) if reuse is not None else {}
        answers: dict[str, dict[str, list[Answer]]] = {name: {} for name in items}
        unanswered = suite.unanswered()
        for name in subjects:
            described = {"model": model, **suite.describe(name)}
            pairs = {
                task.name: Predictions(
                    folder,
                    name,
                    task.name,
                    {**described, "task": tasks[task.name]},
                    [item["id"] for item in items[task.name]],
                    task.chunk,
                )
                for task in suite.tasks
                if task.name not in unanswered.get(name, {})
            }
            _answer_all(suite, name, items, pairs, elsewhere, told)
            for task_name, pair in pairs.items():
                answers[task_name][name] = pair.read()
        data = figures_data(suite, tasks, answers)
        write_json(folder / METRICS_FILE, data)
        return data


def figures_data(
    suite: Suite,
    described: Mapping[str, Mapping[str, Any]],
    answers: Mapping[str, Mapping[str, Sequence[Answer]]],
) -> dict[str, Any]:
    """All figures as plain data for JSON, made of answers by task and subject.

    described: tasks by name.
    """
    results: dict[str, dict[str, Any]] = {name: {} for name in suite.subjects}
    for task in suite.tasks:
        for name, figures in task_figures(task, answers[task.name], seed=suite.seed).items():
            results[name][task.name] = {key: value.to_dict() for key, value in figures.items()}
    data = {
        "format": FORMAT,
        "seed": suite.seed,
        "plain": PLAIN,
        "subjects": suite.subjects,
        "tasks": {
            task.name: {
                "items": len(answers[task.name][PLAIN]),
                "settings": described[task.name]["settings"],
            }
            for task in suite.tasks
        },
        "results": results,
    }
    if suite.peers:
        data |= {"peers": list(suite.peers), "unanswered": suite.unanswered()}
    return data


def _answer_all(
    suite: Suite,
    name: str,
    items: Mapping[str, Sequence[Item]],
    pairs: Mapping[str, Predictions],
    elsewhere: Mapping[str, Path],
    told: Watcher,
) -> None:
    """One subject's answers to its tasks; it is only made ready if any are wanting."""
    wanting: list[tuple[Task, int]] = []
    for task in (task for task in suite.tasks if task.name in pairs):
        done, said = pairs[task.name].open(elsewhere)
        if said is not None:
            told.say(said)
        told.progress(name, task.name, done, len(items[task.name]))
        if done < len(items[task.name]):
            wanting.append((task, done))
    if not wanting:
        return
    with _subject(suite, name, told) as subject:
        for task, done in wanting:
            _answer(subject, task, items[task.name], done, pairs[task.name], suite.seed, told)


def _answer(
    subject: Subject,
    task: Task,
    items: Sequence[Item],
    done: int,
    pair: Predictions,
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
        pair.append(given)
        told.progress(subject.name, task.name, start + len(chunk), len(items))


def _chunk_seed(seed: int, task: str, start: int) -> int:
    """The same for a chunk whether or not those before it were answered in this process."""
    return int.from_bytes(hashlib.sha256(f"{seed} {task} {start}".encode()).digest()[:7], "big")


@contextmanager
def _subject(suite: Suite, name: str, told: Watcher) -> Iterator[Subject]:
    if name in suite.peers:
        with suite.peers[name].open(suite.model, told.say) as peer:
            yield Subject(name, peer, suite.tokenizer, peer=peer)
        return
    addon = suite.candidates.get(name)
    with nullcontext() if addon is None else attach(suite.model, addon):
        yield Subject(name, suite.model, suite.tokenizer, addon)


def _items(task: Task) -> Sequence[Item]:
    """A task's items; raises `EvaluationError` if there are none or two have one id."""
    items = task.items()
    if not items:
        raise EvaluationError(
            f"a task must have at least one item; {task.name} has none; raise --fraction or "
            "--limit, or look into its data"
        )
    ids = [item["id"] for item in items]
    twice = sorted({i for i in ids if ids.count(i) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise EvaluationError(f"ids of items must differ; {task.name} has {twice[:3]} twice")
    return items


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a run folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"can't make the run folder {folder}: {error.strerror}") from error
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise EvaluationError(
            f"one process at a time can write a run folder; another one is writing {folder}; wait "
            "for it, or name another --out"
        ) from None
    try:
        yield
    finally:
        lock.release()
