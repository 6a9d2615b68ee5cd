"""One run of the evaluation suite: subjects answer tasks, into a folder from which a run goes on.

    run.json        what was asked for, by whom (machine, versions, commit), with what seed
    predictions/    <subject>/<task>.jsonl, an answer a line; all figures are made of these
    metrics.json    the figures; the same bytes however often the run was broken off
    cost.json       bytes, memory and time; times differ from run to run, so they lie apart

The plain model is always a subject, the first: every other is compared with it, item by item.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvfold.errors import EvaluationError, ReportError
from kvfold.evaluation.answer_files import finished
from kvfold.evaluation.answering import Desk, Pair, Silent, Watcher, predictions
from kvfold.evaluation.configuration import describe_addon, describe_model, describe_task
from kvfold.evaluation.metrics import FORMAT, task_figures
from kvfold.evaluation.peers.peer import Peer
from kvfold.evaluation.predictions import Predictions
from kvfold.evaluation.report import read_json, write_json
from kvfold.evaluation.run_file import RUN_FILE, read_run_file, write_run_file
from kvfold.evaluation.runner import PLAIN, check_names, check_seed
from kvfold.evaluation.side_by_side import Helpers, answer_side_by_side
from kvfold.evaluation.tasks.registry import shown_name
from kvfold.evaluation.tasks.task import Answer, Item, Task
from kvfold.folder_lock import alone_in
from kvfold.runtime.attach import AddOnLike

METRICS_FILE = "metrics.json"
LOCK_FILE = ".lock"
SKIPPED = "it was left out with --peers-skip"


@dataclass(frozen=True)
class Suite:
    """Who is asked what.

    candidates: add-ons by name; the plain model comes first without being named. seed: of what
    answering and resampling draw; tasks have their own in their settings. config: what the caller
    chose, for `run.json` only. peers: other projects' methods by name, asked last. peers_skip:
    tasks that they are not asked.
    """

    model: Any
    tokenizer: Any
    candidates: Mapping[str, AddOnLike]
    tasks: Sequence[Task]
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    peers: Mapping[str, Peer] = field(default_factory=dict)
    peers_skip: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_names(self.candidates, ())
        check_seed(self.seed)
        both = sorted(set(self.candidates) & set(self.peers))
        if both:
            raise EvaluationError(
                f"subjects must have different names; {', '.join(both)} is an add-on and a peer; "
                "rename the add-on's folder"
            )
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names) or not names:
            raise EvaluationError(f"a suite needs tasks, each once; got {names}")
        unknown = sorted(set(self.peers_skip) - set(names))
        if unknown:
            raise EvaluationError(
                f"peers can only skip tasks that are asked, {', '.join(map(shown_name, names))}; "
                f"got {', '.join(unknown)}"
            )
        for addon in self.candidates.values():
            addon.check_base(self.model)

    @cached_property
    def described(self) -> dict[str, Any]:
        """The plain model as plain data (`describe_model`): all its weights are read for it, once.

        So it must not change while the suite is used.
        """
        return describe_model(self.model, self.tokenizer)

    @cached_property
    def described_tasks(self) -> dict[str, dict[str, Any]]:
        """Each task's settings as plain data, by name."""
        return {task.name: describe_task(task, self.seed) for task in self.tasks}

    @cached_property
    def items(self) -> dict[str, Sequence[Item]]:
        """Each task's items; raises `EvaluationError` if one has none, or two with one id."""
        return {task.name: _items(task) for task in self.tasks}

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
        reasons = {
            task.name: SKIPPED if task.name in self.peers_skip else task.not_for_peers
            for task in self.tasks
        }
        known = {name: reason for name, reason in reasons.items() if reason is not None}
        return {name: dict(known) for name in self.peers} if known else {}


def run_suite(
    suite: Suite,
    folder: Path,
    *,
    reuse: Path | None = None,
    watcher: Watcher | None = None,
    helpers: Helpers | None = None,
) -> dict[str, Any]:
    """Answer what is not answered yet, write the figures, and return them as plain data.

    folder: of this run, which is held meanwhile (`hold_run`); what is there of the same settings
    is kept, answers of other settings are moved to `replaced/` and made anew, or taken back from
    there. reuse: a folder of run folders whose finished answers of the same settings are copied.
    helpers: processes that answer side by side. Raises `EvaluationError` for another process in
    the same folder, damaged files, and answers that can't be judged; `ReportError` where nothing
    can be written.
    """
    with hold_run(folder):
        return answer_suite(suite, folder, reuse=reuse, watcher=watcher, helpers=helpers)


def answer_suite(
    suite: Suite,
    folder: Path,
    *,
    reuse: Path | None = None,
    watcher: Watcher | None = None,
    helpers: Helpers | None = None,
) -> dict[str, Any]:
    """`run_suite` in a folder that the caller holds, and goes on to hold."""
    told = watcher or Silent()
    check_own(folder)
    pairs = predictions(suite, folder)
    peers = {name: peer.describe() for name, peer in suite.peers.items()}
    _remove_figures(folder)
    write_run_file(
        *(folder, suite.config, suite.described, suite.described_tasks),
        *(suite.subjects, suite.seed, peers),
    )
    wanting = _wanting(suite, pairs, {} if reuse is None else finished(reuse, told.say), told)
    if helpers is not None and min(helpers.count, len(wanting)) > 1:
        answer_side_by_side(helpers, folder, {p: pairs[p] for p in wanting}, told)
    else:
        with Desk(suite, told) as desk:
            for pair, done in wanting.items():
                desk.answer(pair, pairs[pair], done)
    answers: dict[str, dict[str, list[Answer]]] = {name: {} for name in suite.items}
    for (subject, task), found in pairs.items():
        answers[task][subject] = found.read()
    data = figures_data(suite, answers)
    write_json(folder / METRICS_FILE, data)
    return data


def check_own(folder: Path) -> None:
    """Raise `EvaluationError` for a folder whose files are of something else and would be replaced.

    Figures without a `run.json` beside them are a run's where they look like some.
    """
    path = folder / METRICS_FILE
    if (folder / RUN_FILE).exists():
        read_run_file(folder)
        return
    if not path.is_file():
        return
    try:
        ours = {"format", "plain", "subjects"} <= read_json(path).keys()
    except EvaluationError:
        ours = False
    if not ours:
        raise EvaluationError(
            f"a run needs a folder of its own; {folder} has a {METRICS_FILE} that is of no run of "
            "kvfold; name another --out, or move the file away"
        )


def _remove_figures(folder: Path) -> None:
    """Remove an earlier run's figures, before anything that they belong to changes."""
    path = folder / METRICS_FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(
            f"can't remove {path}: {error.strerror}; name a folder that can be written"
        ) from None


def _wanting(
    suite: Suite,
    pairs: Mapping[Pair, Predictions],
    elsewhere: Mapping[str, Sequence[Path]],
    told: Watcher,
) -> dict[Pair, int]:
    """Pairs that are not answered to the end, and how many answers each has.

    elsewhere: finished answers of other run folders, by digest.
    """
    wanting: dict[Pair, int] = {}
    for pair, found in pairs.items():
        done, said = found.open(elsewhere)
        if said is not None:
            told.say(said)
        if done < len(suite.items[pair[1]]):
            wanting[pair] = done
    return wanting


def figures_data(
    suite: Suite, answers: Mapping[str, Mapping[str, Sequence[Answer]]]
) -> dict[str, Any]:
    """All figures as plain data for JSON, made of answers by task and subject."""
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
                "settings": suite.described_tasks[task.name]["settings"],
            }
            for task in suite.tasks
        },
        "results": results,
    }
    if suite.peers:
        data |= {"peers": list(suite.peers), "unanswered": suite.unanswered()}
    return data


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
def hold_run(folder: Path) -> Iterator[None]:
    """Hold a run folder, which is made if it is not there, till all that goes into it is there.

    One that was made for this and has got nothing is gone again at the end. Raises
    `EvaluationError` while another process holds it, and `ReportError` or `FolderError` where it
    can't be made or written.
    """
    try:
        there = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"can't make the run folder {folder}: {error.strerror}") from error
    refusal = EvaluationError(
        f"one process at a time can write a run folder; another one is writing {folder}; wait for "
        "it, or name another --out"
    )
    with alone_in(folder, LOCK_FILE, refusal):
        try:
            yield
        finally:
            if not there and [path.name for path in folder.iterdir()] == [LOCK_FILE]:
                shutil.rmtree(folder, ignore_errors=True)
