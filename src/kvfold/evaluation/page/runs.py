"""A finished run as it lies in its folder, and what of it belongs on a page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.errors import EvaluationError
from kvfold.evaluation.answer_files import ANEW, read_description
from kvfold.evaluation.cost import is_cost_of, read_cost
from kvfold.evaluation.metrics import FORMAT
from kvfold.evaluation.page.notes import notes_of
from kvfold.evaluation.predictions import PREDICTIONS, description_path, safe_name
from kvfold.evaluation.report import read_json
from kvfold.evaluation.run_file import read_run_file
from kvfold.evaluation.shapes import AnswerShape, MetricsShape, check_shape
from kvfold.evaluation.suite import METRICS_FILE

NEEDLE = "needle"
LAYER = re.compile(r"(?P<measure>.+)/layer (?P<layer>\d+)")


@dataclass(frozen=True)
class Cell:
    """Answers with a needle at one depth of prompts of one length."""

    length: int
    depth: float
    right: int
    count: int


@dataclass(frozen=True)
class Run:
    """One run folder. cost is empty where no cost was measured, or only of another configuration.

    other_cost: whether there is one of another configuration. needles: cells by subject, of the
    task `needle`. described: what lies beside the answers of each subject to each task.
    """

    folder: Path
    about: Mapping[str, Any]
    metrics: Mapping[str, Any]
    cost: Mapping[str, Any]
    needles: Mapping[str, tuple[Cell, ...]]
    described: Mapping[tuple[str, str], Mapping[str, Any]]
    other_cost: bool = False

    @property
    def title(self) -> str:
        """The model's name as it was given, or the folder's."""
        return str(self.about.get("config", {}).get("model", self.folder.resolve().name))

    @property
    def subjects(self) -> list[str]:
        """Names, the plain model's first."""
        return list(self.metrics["subjects"])

    @property
    def plain(self) -> str:
        """What the plain model is called."""
        return str(self.metrics["plain"])

    def figures(self, task: str, metric: str) -> dict[str, dict[str, Any]]:
        """The figure of each subject that has it."""
        results = self.metrics["results"]
        return {
            name: results[name][task][metric]
            for name in self.subjects
            if metric in results[name].get(task, {})
        }

    def metric_names(self, task: str) -> list[str]:
        """Metrics of a task that any subject has, but for those of single layers."""
        results = self.metrics["results"]
        names = dict.fromkeys(m for name in self.subjects for m in results[name].get(task, {}))
        return [name for name in names if LAYER.fullmatch(name) is None]

    def headline(self, task: str) -> str | None:
        """The one metric that stands for a task.

        An accuracy if there is one, else a figure of all answers together that is no part of
        another (`perplexity`, not `perplexity/512`), else a mean; among those that every subject
        has, the first.
        """
        every = [m for m in self.metric_names(task) if self._all_have(task, m)]
        kinds = {m: self.figures(task, m)[self.plain]["kind"] for m in every}
        ranks = ("accuracy", "summary", "mean")
        whole = [m for m in every if "/" not in m] or every
        return min(whole, key=lambda m: ranks.index(kinds[m]), default=None)

    def headlines(self) -> list[tuple[str, str]]:
        """Task and metric, for each task that has one."""
        found = ((task, self.headline(task)) for task in self.metrics["tasks"])
        return [(task, metric) for task, metric in found if metric is not None]

    def layers(self) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
        """Values by layer and subject, for each task and measure that has them."""
        found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
        for name in self.subjects:
            for task, figures in self.metrics["results"][name].items():
                for metric, figure in figures.items():
                    match = LAYER.fullmatch(metric)
                    if match is not None:
                        by_subject = found.setdefault((task, match["measure"]), {})
                        by_subject.setdefault(name, {})[int(match["layer"])] = figure["value"]
        return found

    def sizes(self) -> tuple[int, dict[str, float]] | None:
        """The middle length of those that bytes are known at, and each subject's bytes there."""
        subjects = self.cost.get("subjects", {})
        if not all(subjects.get(name, {}).get("memory") for name in self.subjects):
            return None
        spot = len(subjects[self.plain]["memory"]) // 2
        at = {name: subjects[name]["memory"][spot] for name in self.subjects}
        stored = {name: float(entry["stored_bytes"]) for name, entry in at.items()}
        return int(at[self.plain]["tokens"]), stored

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before figures are compared."""
        return notes_of(self)

    def _all_have(self, task: str, metric: str) -> bool:
        """Whether every subject that was asked the task has this figure."""
        results = self.metrics["results"]
        return all(metric in results[name][task] for name in self.subjects if task in results[name])


def read_run(folder: Path) -> Run:
    """A finished run; raises `EvaluationError` for a folder that holds none."""
    path = folder / METRICS_FILE
    try:
        there = path.is_file()
    except OSError as error:
        raise EvaluationError(f"can't read the run folder {folder}: {error.strerror}") from None
    if not there:
        raise EvaluationError(
            f"a report is made of finished runs; {folder} has no {METRICS_FILE}; give the run "
            "folder of `kvfold evaluate --tasks ... --out`, and end a run that was broken off by "
            "giving its command again"
        )
    metrics = read_json(path)
    if metrics.get("format") != FORMAT:
        raise EvaluationError(
            f"this kvfold reads figures of format {FORMAT}; {path} has {metrics.get('format')!r}; "
            "run the same command again, which keeps the answers"
        )
    check_shape(metrics, MetricsShape, path, "run the same command again, which keeps the answers")
    about, cost = read_run_file(folder), read_cost(folder)
    described = {
        (name, task): read_description(path)
        for name in metrics["subjects"]
        for task in metrics["tasks"]
        if (path := description_path(folder, name, task)).exists()
    }
    addons = {name: entry["configuration"].get("addon") for (name, _), entry in described.items()}
    ours = not cost or is_cost_of(cost, about, metrics, addons)
    subjects = metrics["subjects"] if NEEDLE in metrics["tasks"] else []
    return Run(
        folder=folder,
        about=about,
        metrics=metrics,
        cost=cost if ours else {},
        needles={name: cells for name in subjects if (cells := tuple(_cells(folder, name)))},
        described=described,
        other_cost=not ours,
    )


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of plain data that holds no others, with its place as `a › b › 0`."""
    if isinstance(data, Mapping):
        entries: Iterator[tuple[Any, Any]] = iter(data.items())
    elif isinstance(data, (list, tuple)):
        entries = iter(enumerate(data))
    else:
        yield path, data
        return
    for key, value in entries:
        yield from leaves(value, f"{path} › {key}" if path else str(key))


def _cells(folder: Path, subject: str) -> Iterator[Cell]:
    """Right answers by length and depth, of answers that say both."""
    path = folder / PREDICTIONS / safe_name(subject) / f"{NEEDLE}.jsonl"
    judged: dict[tuple[int, float], list[bool]] = {}
    if not path.exists():
        return
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EvaluationError(f"{path} can't be read: {error.strerror}; {ANEW}") from None
    for number, line in enumerate(lines, start=1):
        try:
            answer = json.loads(line)
            check_shape(answer, AnswerShape, f"{path}:{number}", ANEW)
            said, scores = answer["said"], answer["scores"]
            right = [score for score in scores.values() if isinstance(score, bool)]
            if right and {"length", "depth"} <= said.keys():
                place = (int(said["length"]), float(said["depth"]))
                judged.setdefault(place, []).append(right[0])
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise EvaluationError(
                f"{path}:{number} must be an answer as JSON ({type(error).__name__}: {error}); "
                "delete the file and run the same command again"
            ) from None
    for (length, depth), answers in sorted(judged.items()):
        yield Cell(length, depth, sum(answers), len(answers))
