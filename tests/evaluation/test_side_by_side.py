"""Helpers answer what one process would, to the byte, and a run tells what went wrong in one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.side_by_side import Helpers, _next
from kvfold.evaluation.suite import run_suite

from .helped_suite import helped_suite

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Lets helpers import what the suite is made of."""
    monkeypatch.syspath_prepend(str(ROOT))


def helped(folder, count=2, **faults):
    make = partial(helped_suite, **faults)
    return run_suite(helped_suite(), folder, helpers=Helpers(count, make))


def files(folder):
    every = (path for path in folder.rglob("*.json*") if path.name != "run.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in every}


def test_two_helpers_give_the_bytes_of_one_process(tmp_path):
    run_suite(helped_suite(), tmp_path / "alone")
    helped(tmp_path / "helped")
    assert files(tmp_path / "helped") == files(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"raises": True}, "no answer to that"),
        ({"dies": True}, "ended with status 3"),
        ({"items": 5}, "is other in a helper"),
    ],
)
def test_a_run_ends_with_what_went_wrong_in_a_helper_and_can_go_on(tmp_path, fault, words):
    with pytest.raises(EvaluationError, match=words):
        helped(tmp_path / "run", **fault)
    assert not (tmp_path / "run/metrics.json").exists()
    run_suite(helped_suite(), tmp_path / "run")
    run_suite(helped_suite(), tmp_path / "alone")
    assert files(tmp_path / "run") == files(tmp_path / "alone")


def test_a_helper_stays_with_its_subject_and_takes_from_others_at_last():
    todo = [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    first = _next(todo, None, [])
    second = _next(todo, None, [first])
    assert (first, second) == (("a", "x"), ("b", "x"))
    assert _next(todo, first, [first, second]) == ("a", "y")
    assert _next(todo, ("a", "y"), [second]) == ("b", "y")
    assert _next(todo, second, []) is None


def test_a_run_needs_a_process():
    with pytest.raises(EvaluationError, match="at least 1; got 0"):
        Helpers(0, helped_suite)
