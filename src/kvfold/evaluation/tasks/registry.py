"""Which tasks there are, by the name that the command line knows; nothing is imported until used.

A maker is named by module and attribute. It takes `TaskSettings` and returns the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType

from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Task

Maker = Callable[[TaskSettings], Task]

_HERE = "kvfold.evaluation.tasks"
MAKERS: Mapping[str, str] = MappingProxyType(
    {
        "perplexity": f"{_HERE}.perplexity:make",
        "lambada": f"{_HERE}.lambada:lambada",
        "gsm8k": f"{_HERE}.gsm8k:gsm8k",
        "ifeval": f"{_HERE}.ifeval:ifeval",
        "needle": f"{_HERE}.needle:make",
        "ruler": f"{_HERE}.ruler:make",
        "ruler-file": f"{_HERE}.ruler:make_from_file",
        "recall": f"{_HERE}.recall:make",
        "turns": f"{_HERE}.turns:make",
        "fidelity": f"{_HERE}.fidelity:make",
    }
)
STORED_NAMES: Mapping[str, str] = MappingProxyType({"ruler-file": "ruler_file"})
"""What tasks are called in runs, where that is not their name on the command line."""

ANSWERED_FREELY = ("gsm8k", "ifeval")
"""Tasks of the harness that are answered by a text, up to its end: where it ends at the latest, and
whether prompts are put into a chat template, can be chosen."""


def task_names() -> tuple[str, ...]:
    """Every task's name, in the order in which help and errors list them."""
    return tuple(MAKERS)


def stored_name(name: str) -> str:
    """What a task that the command line names is called in runs."""
    return STORED_NAMES.get(name, name)


def shown_name(stored: str) -> str:
    """What a run's task is called on the command line, and wherever a person reads of it."""
    return next((name for name, other in STORED_NAMES.items() if other == stored), stored)


def make_task(name: str, settings: TaskSettings) -> Task:
    """The task of that name; raises `EvaluationError`, which lists all, if there is none.

    What the task needs but can't find (data, an optional dependency) is its own error.
    """
    check_known([name])
    module, attribute = MAKERS[name].split(":")
    maker: Maker = getattr(import_module(module), attribute)
    return maker(settings)


def make_tasks(
    names: Sequence[str],
    settings: TaskSettings,
    limits: Mapping[str, int] | None = None,
    answer_tokens: Mapping[str, int] | None = None,
    chat_templates: Sequence[str] = (),
) -> list[Task]:
    """All of these tasks, in order; names are checked before any task reads its data.

    limits: items at most of single tasks, in place of the settings' own limit. answer_tokens: most
    new tokens of an answer, chat_templates: whose prompts are put into the tokenizer's template;
    of tasks in `ANSWERED_FREELY`.
    """
    check_known(names)
    of_one = limits or {}
    others = sorted(set(of_one) - set(names))
    if others:
        raise EvaluationError(
            f"a limit is of a task that is asked, {', '.join(names)}; got one of "
            f"{', '.join(others)}; name the task as well, or leave its limit out"
        )
    cut = answer_tokens or {}
    for what, chosen in (("number of tokens", cut), ("chat template", chat_templates)):
        if wrong := sorted(set(chosen) - (set(names) & set(ANSWERED_FREELY))):
            raise EvaluationError(
                f"a {what} can be chosen for {', '.join(ANSWERED_FREELY)}, where they are asked; "
                f"got one for {', '.join(wrong)}; leave it out"
            )
    return [
        make_task(
            name,
            replace(
                settings,
                limit=of_one.get(name, settings.limit),
                answer_tokens=cut.get(name),
                chat_template=name in chat_templates,
            ),
        )
        for name in names
    ]


def check_known(names: Sequence[str]) -> None:
    """Raise `EvaluationError` for no name, an unknown one, or one that is there twice."""
    known = ", ".join(MAKERS) or "none"
    if not names:
        raise EvaluationError(f"at least one task must be named, of {known}; got none")
    for name in names:
        if name not in MAKERS:
            near = get_close_matches(name.lower().replace("_", "-"), MAKERS, n=1)
            remedy = f"did you mean {near[0]}?" if near else "name one of those"
            raise EvaluationError(f"a task must be one of {known}; got {name[:80]!r}; {remedy}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EvaluationError(
            f"each task runs once; got {', '.join(twice)} more than once; name it once"
        )
