"""A finished run as it lies in its folder, and what of it belongs on a page."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    task `needle`. described: what lies beside the answers of each subject to each task. lengths:
    of what the items of a task have read, in tokens, for each task that tells them.
    """

    folder: Path
    about: Mapping[str, Any]
    metrics: Mapping[str, Any]
    cost: Mapping[str, Any]
    needles: Mapping[str, tuple[Cell, ...]]
    described: Mapping[tuple[str, str], Mapping[str, Any]]
    other_cost: bool = False
    lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

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
        """The length that is nearest to what items read, and each subject's bytes there.

        Of the lengths that bytes are known at; the middle one where no task tells its lengths.
        What items read is the median of the tasks' own medians, so that no task of many items
        speaks for all.
        """
        subjects = self.cost.get("subjects", {})
        if not all(subjects.get(name, {}).get("memory") for name in self.subjects):
            return None
        memory = subjects[self.plain]["memory"]
        spot = len(memory) // 2
        if self.lengths:
            read = statistics.median(map(statistics.median, self.lengths.values()))
            spot = min(range(len(memory)), key=lambda index: abs(memory[index]["tokens"] - read))
        at = {name: subjects[name]["memory"][spot] for name in self.subjects}
        stored = {name: float(entry["stored_bytes"]) for name, entry in at.items()}
        return int(at[self.plain]["tokens"]), stored

    def differences(self, name: str, task: str) -> list[Mapping[str, Any]]:
        """How a subject's scores of a task differ from the plain model's.

        Summaries are made of the same items, and only bring rounding of all together: they are
        looked at where a task has nothing else.
        """
        figures = self.metrics["results"][name].get(task, {}).values()
        told = [figure for figure in figures if figure["difference"]]
        scores = [figure for figure in told if figure["kind"] != "summary"] or told
        return [figure["difference"] for figure in scores]

    @property
    def unplotted(self) -> list[str]:
        """Tasks in which no score of any add-on is another than the plain model's.

        Mostly nothing was folded there, so that bytes of any length would belong to none of them.
        """
        peers = self.metrics.get("peers", ())
        addons = [n for n in self.subjects if n != self.plain and n not in peers]
        found: list[str] = []
        for task in self.metrics["tasks"]:
            told = [d["verdict"] for n in addons for d in self.differences(n, task)]
            if told and set(told) == {"same"}:
                found.append(task)
        return found

    @property
    def timed(self) -> str:
        """How times were measured, as `one row in float32, 2 threads`, as far as it is known."""
        dtype = self.about.get("model", {}).get("dtype")
        threads = self.cost.get("machine", {}).get("torch_threads")
        row = "one row" if dtype is None else f"one row in {dtype}"
        unit = "thread" if threads == 1 else "threads"
        return row if threads is None else f"{row}, {threads} {unit}"

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
        lengths={t: found for t in metrics["tasks"] if (found := _lengths(folder, metrics, t))},
    )


def names_of(runs: Sequence[Run]) -> list[str]:
    """What each run is called: its title, and its folder too where titles are alike."""
    titles = [run.title for run in runs]
    if len(set(titles)) == len(titles):
        return titles
    short = [f"{run.folder.resolve().name}: {run.title}" for run in runs]
    if len(set(short)) == len(short):
        return short
    return [f"{run.folder}: {run.title}" for run in runs]


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


def _lengths(folder: Path, metrics: Mapping[str, Any], task: str) -> tuple[int, ...]:
    """Tokens that items of a task read, as its settings tell, or else the plain model's answers.

    The settings come first: they lie in a published run, whose answers do not. A conversation has
    read all of its turns at its end.
    """
    settings = metrics["tasks"][task].get("settings", {})
    lengths: Any = settings.get("lengths")
    if not lengths:
        path = folder / PREDICTIONS / safe_name(metrics["plain"]) / f"{safe_name(task)}.jsonl"
        lengths = [answer["said"].get("length") for _, answer in _answers(path)]
    turns = settings.get("turns", 1)
    known = isinstance(lengths, list) and all(type(n) is int for n in (turns, *lengths))
    return tuple(length * turns for length in lengths) if known else ()


def _cells(folder: Path, subject: str) -> Iterator[Cell]:
    """Right answers by length and depth, of answers that say both."""
    path = folder / PREDICTIONS / safe_name(subject) / f"{NEEDLE}.jsonl"
    judged: dict[tuple[int, float], list[bool]] = {}
    for number, answer in _answers(path):
        said, scores = answer["said"], answer["scores"]
        right = [score for score in scores.values() if isinstance(score, bool)]
        if not right or not {"length", "depth"} <= said.keys():
            continue
        try:
            place = (int(said["length"]), float(said["depth"]))
        except (ValueError, TypeError, OverflowError) as error:
            raise _no_answer(path, number, error) from None
        judged.setdefault(place, []).append(right[0])
    for (length, depth), answers in sorted(judged.items()):
        yield Cell(length, depth, sum(answers), len(answers))


def _answers(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every answer of a file with the number of its line; none where there is no file."""
    if not path.exists():
        return
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EvaluationError(f"{path} can't be read: {error.strerror}; {ANEW}") from None
    for number, line in enumerate(lines, start=1):
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _no_answer(path, number, error) from None
        check_shape(answer, AnswerShape, f"{path}:{number}", ANEW)
        yield number, answer


def _no_answer(path: Path, number: int, error: Exception) -> EvaluationError:
    return EvaluationError(
        f"{path}:{number} must be an answer as JSON ({type(error).__name__}: {error}); delete the "
        "file and run the same command again"
    )
