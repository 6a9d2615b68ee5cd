"""Figures of a run, made of its answers alone: values, intervals, differences from the plain model.

The same answers give the same figures to the last digit, whether the run that made them was broken
off or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from kvfold.errors import EvaluationError
from kvfold.evaluation.resampling import (
    FEWEST_DIFFERING,
    FEWEST_ITEMS,
    Column,
    Draws,
    Values,
    alike,
    changed_answers,
    differing_items,
    draws,
    resampled_interval,
    within_noise,
)
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.share import wilson
from kvfold.evaluation.tasks.task import Answer, Task

FORMAT = 1
SUMMARY_RESAMPLES = 400
"""Fewer than of scores, since a task's summary is made anew for each."""

Kind = Literal["accuracy", "mean", "summary"]
Better = Literal["higher", "lower"]
Verdict = Literal["same", "too few items", "within noise", "higher", "lower"]
Interval = tuple[float, float] | None

SHARES = ("score", "accuracy")
"""Numbers, not right or wrong answers, that are shares of something as well."""

_LOWER = "ppl perplexity kl loss nll bits mse"
_HIGHER = "acc accuracy agreement cosine match divergence consistency recall score probability"
LOWER_IS_BETTER, HIGHER_IS_BETTER = (
    re.compile(rf"(?:^|[^a-z])(?:{'|'.join(words.split())})(?:[^a-z]|$)")
    for words in (_LOWER, _HIGHER)
)
"""Words in names of numbers; `first_divergence` is how far two texts agree."""

PERPLEXITY, SHARE, COSINE = (
    re.compile(rf"(?:^|[^a-z])(?:{words})(?:[^a-z]|$)")
    for words in ("perplexity|ppl", "agreement", "cosine")
)


@dataclass(frozen=True)
class Difference:
    """A figure minus the plain model's, compared on the same items.

    interval: 95%, from paired resamples. relative: of the plain model's, None for accuracies and
    where that is 0. differing: items on which the two differ. verdict: `same` where none does,
    `within noise` where the interval holds 0 or too few right or wrong answers are others, `too few
    items` where so few were asked that nothing could have been told.
    """

    value: float
    interval: Interval
    relative: float | None
    differing: int
    within_noise: bool
    verdict: Verdict


@dataclass(frozen=True)
class Figure:
    """One metric of one subject at one task.

    kind: accuracy, of right or wrong answers; mean, of numbers; summary, of all answers at once.
    interval: 95%. items: those that it was made of. right, count: judgements, of an accuracy.
    better: which way is, None if it isn't known. difference: from the plain model.
    """

    kind: Kind
    value: float
    interval: Interval
    items: int
    better: Better | None
    right: int | None = None
    count: int | None = None
    difference: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


Figures = dict[str, dict[str, Figure]]
"""By subject, then by metric."""


def task_figures(task: Task, answers: Mapping[str, Sequence[Answer]], *, seed: int) -> Figures:
    """All figures of one task, the plain model's first.

    answers: every subject's to all items, in the items' order; the plain model's are among them.
    seed: of the resamples. Raises `EvaluationError` for scores that make no figure: not finite,
    or of another kind than those of other items.
    """
    items = len(answers[PLAIN])
    many = draws(items, seed, task.name)
    few = draws(items, seed, task.name, SUMMARY_RESAMPLES)
    known = {name: _series(task, name, given, many, few) for name, given in answers.items()}
    plain = known[PLAIN]
    return {
        name: {
            metric: series.figure()
            if name == PLAIN or metric not in plain
            else replace(series.figure(), difference=_difference(series, plain[metric]))
            for metric, series in mine.items()
        }
        for name, mine in known.items()
    }


class _Series(Protocol):
    """One metric of one subject."""

    def figure(self) -> Figure:
        """Its value, without a difference."""

    def paired(self, plain: Any) -> _Paired:
        """Its difference from another of its class."""


class _Paired(NamedTuple):
    """A difference on the items that both have.

    resampled: (resamples,) values. plain: (resamples,) of the plain model's figure. items: that
    both have. differing: those of them that differ. changed, judged: answers that are others, of so
    many, where they are right or wrong or shares; None of other numbers.
    """

    value: float
    resampled: Values
    plain: Values
    items: int
    differing: int
    changed: float | None = None
    judged: int | None = None

    @property
    def too_few(self) -> bool:
        """Whether nothing could be told of any outcome."""
        return self.items < FEWEST_ITEMS or (self.judged or FEWEST_DIFFERING) < FEWEST_DIFFERING


class _Scored:
    """A metric that each answer has a score of."""

    def __init__(self, metric: str, kind: Kind, column: Column, chosen: Draws) -> None:
        self.metric, self.kind, self.column, self.chosen = metric, kind, column, chosen

    def figure(self) -> Figure:
        column, exact = self.column, self.kind == "accuracy"
        items = int((column.weights > 0).sum())
        return Figure(
            kind=self.kind,
            value=column.value,
            interval=self._interval(items),
            items=items,
            better="higher" if exact else _better(self.metric),
            right=int(column.sums.sum()) if exact else None,
            count=int(column.weights.sum()) if exact else None,
        )

    def _interval(self, items: int) -> Interval:
        column = self.column
        if self.kind == "accuracy":
            return column.share_interval()
        if is_share(self.metric) and ((column.sums >= 0) & (column.sums <= 1)).all():
            return wilson(column.value, items)  # shares vary at most as right and wrong answers do
        resampled = column.resampled(self.chosen)
        return resampled_interval(resampled, column.value, items, _bounds(self.metric))

    def paired(self, plain: _Scored) -> _Paired:
        both = (self.column.weights > 0) & (plain.column.weights > 0)
        if not both.any():
            unknown = np.full(len(self.chosen), np.nan)
            return _Paired(math.nan, unknown, unknown, 0, 0)
        ours, theirs = (
            Column(np.where(both, column.sums, 0.0), np.where(both, column.weights, 0.0))
            for column in (self.column, plain.column)
        )
        base = theirs.resampled(self.chosen)
        resampled = ours.resampled(self.chosen) - base
        value, items = ours.value - theirs.value, int(both.sum())
        differing = differing_items(ours, theirs)
        if self.kind == "accuracy":
            changed, judged = changed_answers(ours, theirs), int(ours.weights.sum())
            return _Paired(value, resampled, base, items, differing, changed, judged)
        if is_share(self.metric):  # which may be as coarse as right and wrong
            return _Paired(value, resampled, base, items, differing, differing, items)
        return _Paired(value, resampled, base, items, differing)


class _Summed:
    """A metric that only all answers together have.

    alone: what the task's summary is of each answer by itself; those that can't tell this metric
    have no part in it. resamples: what it is of each draw of the answers.
    """

    def __init__(
        self,
        metric: str,
        value: float,
        alone: Sequence[Mapping[str, float]],
        resamples: Sequence[Mapping[str, float]],
    ) -> None:
        self.metric, self.value = metric, value
        self.alone = [one.get(metric) for one in alone]
        self.resampled: Values = np.array([r.get(metric, math.nan) for r in resamples])

    def figure(self) -> Figure:
        items = sum(one is not None for one in self.alone)
        return Figure(
            kind="summary",
            value=self.value,
            interval=self._interval(items),
            items=items,
            better=_better(self.metric),
        )

    def _interval(self, items: int) -> Interval:
        """Of a perplexity by its logarithm, as losses vary."""
        logarithms = PERPLEXITY.search(self.metric.lower()) and not (self.resampled <= 0).any()
        low, high = _bounds(self.metric)
        if not logarithms or self.value <= 0:
            return resampled_interval(self.resampled, self.value, items, (low, high))
        bounds = math.log(low), high
        found = resampled_interval(np.log(self.resampled), math.log(self.value), items, bounds)
        return None if found is None else (math.exp(found[0]), math.exp(found[1]))

    def paired(self, plain: _Summed) -> _Paired:
        pairs = [
            (ours, theirs)
            for ours, theirs in zip(self.alone, plain.alone, strict=True)
            if ours is not None or theirs is not None
        ]
        differing = sum(not alike(ours, theirs) for ours, theirs in pairs)
        base = plain.resampled
        return _Paired(self.value - plain.value, self.resampled - base, base, len(pairs), differing)


def is_share(metric: str) -> bool:
    """Whether a number by this name, or a part of it, is a share of something."""
    return metric.split("/")[0] in SHARES


def _better(metric: str) -> Better | None:
    """What is known of numbers by their name; of most nothing is."""
    name = metric.lower()
    if LOWER_IS_BETTER.search(name):
        return "lower"
    return "higher" if HIGHER_IS_BETTER.search(name) else None


def _bounds(metric: str) -> tuple[float, float]:
    """What numbers by this name can be at all."""
    name = metric.lower()
    if is_share(metric) or SHARE.search(name):
        return 0.0, 1.0
    if COSINE.search(name):
        return -1.0, 1.0
    if PERPLEXITY.search(name):
        return 1.0, math.inf
    return (0.0 if LOWER_IS_BETTER.search(name) else -math.inf), math.inf


def _difference_bounds(metric: str, kind: Kind, plain: Values) -> tuple[float, float]:
    """What a difference can be at all from any of the plain model's resampled figures.

    Where those are all the same, as its KL of 0 from itself is, that is a bound as well.
    """
    low, high = (0.0, 1.0) if kind == "accuracy" else _bounds(metric)
    known = plain[np.isfinite(plain)]
    if not len(known):
        return low - high, high - low
    return low - float(known.max()), high - float(known.min())


def _difference(ours: Any, plain: Any) -> Difference | None:
    """From the plain model; None if the two have no item or no kind of figure in common."""
    if type(ours) is not type(plain):
        return None
    found: _Paired = ours.paired(plain)
    value, base = found.value, plain.figure()
    if not math.isfinite(value):
        return None
    bounds = _difference_bounds(ours.metric, base.kind, found.plain)
    interval = resampled_interval(found.resampled, value, found.items, bounds)
    noise = not found.differing or found.too_few or within_noise(interval, found.changed)
    verdict: Verdict = "higher" if value > 0 else "lower"
    if noise:
        verdict = "too few items" if found.too_few else "within noise"
    if not found.differing:
        verdict = "same"
    return Difference(
        value=value,
        interval=interval,
        relative=value / base.value if base.kind != "accuracy" and base.value > 0 else None,
        differing=found.differing,
        within_noise=noise,
        verdict=verdict,
    )


def _series(
    task: Task, subject: str, answers: Sequence[Answer], many: Draws, few: Draws
) -> dict[str, _Series]:
    """Every metric of one subject: scores, each with its parts, and then the summary."""
    where = f"{task.name} of {subject}"
    found: dict[str, _Series] = {}
    for metric in dict.fromkeys(name for answer in answers for name in answer.scores):
        kind, column = _column(metric, answers, where)
        if not column.weights.any():  # never judged, as facts that no question went so far back to
            continue
        found[metric] = _Scored(metric, kind, column, many)
        for name, part in _parts(task, answers, column).items():
            found[f"{metric}/{name}"] = _Scored(f"{metric}/{name}", kind, part, many)
    summary = task.summary(answers)
    resamples = [task.summary([answers[i] for i in draw]) for draw in few] if summary else []
    alone = [task.summary([answer]) for answer in answers] if summary else []
    for metric, value in summary.items():
        if metric in found:
            raise EvaluationError(
                f"a metric has one meaning; {task.name} has {metric!r} as a score and in its "
                "summary; rename one"
            )
        if not math.isfinite(value):
            raise _not_finite(f"{metric} in the summary of {where}", value)
        found[metric] = _Summed(metric, float(value), alone, resamples)
    return found


def _column(metric: str, answers: Sequence[Answer], where: str) -> tuple[Kind, Column]:
    """The scores of one metric; an item without it has no weight."""
    sums, weights = np.zeros(len(answers)), np.zeros(len(answers))
    kinds: set[Kind] = set()
    for index, answer in enumerate(answers):
        if metric not in answer.scores:
            continue
        score = answer.scores[metric]
        if isinstance(score, bool) or not isinstance(score, (int, float)):
            judged = [score] if isinstance(score, bool) else list(score)
            kinds.add("accuracy")
            sums[index], weights[index] = sum(judged), len(judged)
        else:
            if not math.isfinite(score):
                raise _not_finite(f"{metric} of item {answer.item!r}, {where},", score)
            kinds.add("mean")
            sums[index], weights[index] = score, 1
    if len(kinds) > 1:
        raise EvaluationError(
            f"all scores of a metric must be of one kind; {metric} of {where} has both right or "
            "wrong answers and numbers; give it true and false, or numbers, for every item"
        )
    return kinds.pop(), Column(sums, weights)


def _parts(task: Task, answers: Sequence[Answer], column: Column) -> dict[str, Column]:
    """A metric among the answers that say the same of themselves, as `kind a/length 512`."""
    found: dict[str, Column] = {}
    for keys in task.parts:
        named = ["/".join(f"{key} {answer.said[key]}" for key in keys) for answer in answers]
        for name in dict.fromkeys(named):
            within = np.array([other == name for other in named]) & (column.weights > 0)
            if within.any():
                found[name] = Column(
                    np.where(within, column.sums, 0.0), np.where(within, column.weights, 0.0)
                )
    return found


def _not_finite(what: str, value: float) -> EvaluationError:
    return EvaluationError(
        f"every figure must be finite; {what} is {value}; the model's activations overflow: load "
        "it in float32 or bfloat16, or fit its add-on on more text"
    )
