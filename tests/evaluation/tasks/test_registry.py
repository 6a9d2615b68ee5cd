"""Tasks are found by name and made from settings; nothing is imported until it is used."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks import registry
from kvfold.evaluation.tasks.settings import TaskSettings


@pytest.fixture
def made(monkeypatch):
    """Two tasks in a module that is there, one in a module that isn't; and what was made."""
    calls = []

    def make(settings):
        calls.append(settings)
        return SimpleNamespace(name=f"task {len(calls)}")

    monkeypatch.setitem(sys.modules, "some_tasks", SimpleNamespace(make=make))
    makers = {"a": "some_tasks:make", "b": "some_tasks:make", "gone": "no_such_module:make"}
    monkeypatch.setattr(registry, "MAKERS", makers)
    return calls


def test_tasks_are_made_in_order_from_the_settings(made):
    settings = TaskSettings(data=None, seed=3)
    tasks = registry.make_tasks(["b", "a"], settings)
    assert [task.name for task in tasks] == ["task 1", "task 2"]
    assert made == [settings, settings]
    assert registry.task_names() == ("a", "b", "gone")


def test_a_task_may_have_a_limit_of_its_own(made):
    registry.make_tasks(["b", "a"], TaskSettings(data=None, limit=9), {"a": 2})
    assert [settings.limit for settings in made] == [9, 2]


def test_a_limit_of_a_task_that_is_not_asked_is_refused(made):
    with pytest.raises(EvaluationError, match="one of b"):
        registry.make_tasks(["a"], TaskSettings(data=None), {"b": 2})
    assert made == []


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", "c"], "one of a, b, gone; got 'c'"),
        (["a", "a"], "more than once"),
        ([], "at least one task"),
    ],
)
def test_wrong_names_are_refused_before_a_task_is_made(made, names, words):
    with pytest.raises(EvaluationError, match=words):
        registry.make_tasks(names, TaskSettings(data=None))
    assert made == []


def test_a_name_that_is_nearly_right_is_told():
    for wrong, right in (("Recal", "recall"), ("ruler_file", "ruler-file"), ("lambda", "lambada")):
        with pytest.raises(EvaluationError, match=rf"got '{wrong}'; did you mean {right}\?"):
            registry.check_known([wrong])
    with pytest.raises(EvaluationError, match=r"got 'x{80}'; name one of those"):
        registry.check_known(["x" * 300])
