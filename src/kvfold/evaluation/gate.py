"""Rules that a run must keep, for people's own continuous integration.

    lambada.acc: {max_drop: 0.02}
    perplexity.ppl: {max_rise: 0.03}
    needle.acc: {min: 0.9, subjects: [my-addon]}

`max_drop` and `max_rise` are from the plain model, on the same items: of an accuracy in its own
points (0.02 is from 60% to 58%), of any other figure as a fraction of the plain model's (0.03 is
three percent). `min` and `max` are limits of the figure itself. A metric may have several rules,
as a list. Rules hold for all subjects but the plain model and other projects' methods unless they
name some. What can't be checked is an error and never passes.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvfold.errors import EvaluationError
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.tasks.registry import shown_name, stored_name

CHANGES = ("max_drop", "max_rise")
"""Bounds of differences from the plain model."""

BOUNDS = (*CHANGES, "min", "max")
ROUNDING = 1e-9
"""What a bound may be passed by: 0.60 - 0.58 is a little more than 0.02 in binary."""


@dataclass(frozen=True)
class Rule:
    """One bound. metric: as `task.metric`. subjects: None for all add-ons."""

    metric: str
    bound: str
    limit: float
    subjects: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Check:
    """A rule applied to a subject. measured: what is held against the limit.

    verdict: of the figure's difference from the plain model's, as in `metrics.json`; None where it
    has none. within_noise: of the same.
    """

    rule: Rule
    subject: str
    measured: float
    passed: bool
    within_noise: bool | None
    verdict: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "metric": self.rule.metric,
            "subject": self.subject,
            "bound": self.rule.bound,
            "limit": self.rule.limit,
            "measured": self.measured,
            "passed": self.passed,
            "within_noise": self.within_noise,
            "verdict": self.verdict,
        }


def read_rules(path: Path) -> tuple[Rule, ...]:
    """Rules from a YAML or JSON file; raises `EvaluationError` saying what is wrong and where."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        twice = _repeated(node)
        data = None if node is None else yaml.SafeLoader("").construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"can't read the rules {path}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # one of 5,000 digits, a 13th month
        raise EvaluationError(f"rules must be valid YAML or JSON; {path}: {error}") from None
    except RecursionError:
        raise EvaluationError(f"rules must not be nested so deeply; {path}") from None
    if twice is not None:
        raise EvaluationError(
            f"{path}:{twice[1]}: {twice[0]!r} is there twice, and only one would count; make a "
            "list of rules of it"
        )
    if not isinstance(data, dict) or not data:
        raise EvaluationError(
            f"rules must be a mapping such as `lambada.acc: {{max_drop: 0.02}}`, and at least one; "
            f"{path} holds {_short(data)}"
        )
    return tuple(
        rule
        for metric, value in data.items()
        for entry in _entries(path, metric, value)
        for rule in _rules(path, metric, entry)
    )


def check_rules(rules: Sequence[Rule], metrics: Mapping[str, Any]) -> list[Check]:
    """Every rule for every subject that it names.

    metrics: what a run's `metrics.json` holds. Raises `EvaluationError` for a metric or subject
    that the run hasn't, and for a rule that can't be told.
    """
    return [
        _check(rule, subject, metrics) for rule in rules for subject in _subjects(rule, metrics)
    ]


def check_asked(
    rules: Sequence[Rule],
    tasks: Sequence[str],
    subjects: Sequence[str] | None = None,
    peers: Sequence[str] = (),
) -> None:
    """Raise `EvaluationError` for rules of tasks, or of subjects, that a run won't ask.

    And for bounds of differences of the plain model from itself. Which metrics a task has is known
    only when it is answered. subjects: None where they are not known yet. peers: further ones.
    """
    for rule in rules:
        task = rule.metric.partition(".")[0]
        if task not in tasks:
            raise EvaluationError(
                f"a rule needs a task that is asked, {', '.join(tasks)}; got one for "
                f"{rule.metric}; ask {task} as well, or leave the rule out"
            )
        if subjects is not None:
            known = {"subjects": [*subjects, *peers], "plain": PLAIN, "peers": peers}
            named = _subjects(rule, known)
            if PLAIN in named and rule.bound in CHANGES:
                raise _no_difference(rule, PLAIN)


def _entries(path: Path, metric: Any, value: Any) -> list[Any]:
    if value == []:
        raise EvaluationError(f"{path}: {metric}: a list of rules must have at least one")
    return value if isinstance(value, list) else [value]


def _rules(path: Path, metric: Any, entry: Any) -> list[Rule]:
    where = f"{path}: {metric}"
    if not isinstance(metric, str) or not all(metric.partition(".")):
        raise EvaluationError(f"{where}: a metric is named as task.metric, such as lambada.acc")
    if not isinstance(entry, dict) or not set(entry) - {"subjects"}:
        raise EvaluationError(
            f"{where}: a rule must be a mapping with one of {', '.join(BOUNDS)}; got "
            f"{_short(entry)}"
        )
    unknown = [str(key) for key in entry if key not in (*BOUNDS, "subjects")]
    if unknown:
        raise EvaluationError(
            f"{where}: a rule knows {', '.join(BOUNDS)} and subjects; got {', '.join(unknown)}"
        )
    subjects = entry.get("subjects")
    if subjects is not None and not (
        isinstance(subjects, list) and subjects and all(isinstance(s, str) for s in subjects)
    ):
        raise EvaluationError(f"{where}: subjects must be a list of names; got {_short(subjects)}")
    named = None if subjects is None else tuple(subjects)
    bounds = {key: limit for key, limit in entry.items() if key != "subjects"}
    task, _, name = metric.partition(".")
    metric = f"{shown_name(task)}.{name}"  # which may have been named as it is in metrics.json
    return [Rule(metric, key, _limit(where, key, limit), named) for key, limit in bounds.items()]


def _limit(where: str, bound: str, limit: Any) -> float:
    number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if not number or not abs(limit) <= sys.float_info.max:
        raise EvaluationError(f"{where}: {bound} must be a number; got {_short(limit)}")
    if bound in CHANGES and limit < 0:
        raise EvaluationError(f"{where}: {bound} must be at least 0; got {_short(limit)}")
    if bound == "max_drop" and limit >= 1:
        raise EvaluationError(
            f"{where}: max_drop must be below 1, which is all of a figure, or a rule is always "
            f"kept; got {_short(limit)}; 0.02 is two points, or two percent"
        )
    return float(limit)


def _short(value: Any) -> str:
    """A value for a message, however large it is, or if it has itself within."""
    try:
        text = reprlib.repr(value) if isinstance(value, list | dict | int) else repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "a number of very many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _subjects(rule: Rule, metrics: Mapping[str, Any]) -> Sequence[str]:
    every, plain = list(metrics["subjects"]), metrics["plain"]
    if rule.subjects is None:
        others = {plain, *metrics.get("peers", ())}
        return [name for name in every if name not in others] or [plain]
    unknown = [name for name in rule.subjects if name not in every]
    if unknown:
        raise EvaluationError(
            f"the rule for {rule.metric} names {', '.join(unknown)}; this run has "
            f"{', '.join(every)}"
        )
    return rule.subjects


def _check(rule: Rule, subject: str, metrics: Mapping[str, Any]) -> Check:
    figure = _figure(rule.metric, subject, metrics)
    value, difference = figure["value"], figure["difference"]
    noise, verdict = (
        None if difference is None else difference[key] for key in ("within_noise", "verdict")
    )
    if rule.bound in ("min", "max"):
        low, high = (rule.limit, value) if rule.bound == "min" else (value, rule.limit)
        return Check(rule, subject, value, low <= high + ROUNDING, noise, verdict)
    if difference is None:
        raise _no_difference(rule, subject)
    change = difference["value"] if figure["kind"] == "accuracy" else difference["relative"]
    if change is None:
        raise EvaluationError(
            f"{rule.metric}: {rule.bound} is a fraction of the plain model's figure, which is "
            f"{_figure(rule.metric, metrics['plain'], metrics)['value']}; use min or max"
        )
    moved = -change if rule.bound == "max_drop" else change
    return Check(rule, subject, moved, moved <= rule.limit + ROUNDING, noise, verdict)


def _no_difference(rule: Rule, subject: str) -> EvaluationError:
    return EvaluationError(
        f"{rule.metric}: {rule.bound} is from the plain model, and {subject} has no difference "
        "from it; name other subjects, or use min and max"
    )


def _figure(metric: str, subject: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    task, _, name = metric.partition(".")
    by_task, task = metrics["results"][subject], stored_name(task)
    if name not in by_task.get(task, {}):
        known = [f"{shown_name(t)}.{m}" for t, found in by_task.items() for m in found]
        raise EvaluationError(
            f"a rule needs a metric of the run; {metric!r} is none of {subject}'s: "
            f"{', '.join(known)}"
        )
    figure: dict[str, Any] = by_task[task][name]
    return figure


def _repeated(
    node: yaml.Node | None, known: set[yaml.Node] | None = None
) -> tuple[str, int] | None:
    """A key that a mapping has twice, and its line.

    known: nodes that were looked into, since an alias may lead to one again, or into itself.
    """
    known = set() if known is None else known
    if node is None or node in known:
        return None
    known.add(node)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                return str(key.value), key.start_mark.line + 1
            seen.add(str(key.value))
            if (found := _repeated(value, known)) is not None:
                return found
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            if (found := _repeated(value, known)) is not None:
                return found
    return None
