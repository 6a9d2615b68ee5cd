"""Answers are kept whatever is asked in between, and what is damaged is never used or added to."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from kvfold.errors import EvaluationError, ReportError
from kvfold.evaluation import predictions
from kvfold.evaluation.answer_files import finished
from kvfold.evaluation.predictions import Predictions
from kvfold.evaluation.tasks.task import Answer

CODE = {"commit": "c0ffee", "sources": "0" * 64}


class Killed(BaseException):
    """Stands for a kill: no code expects it."""


def answers_to(run, limit, subject="a"):
    """The first `limit` of four answers, in chunks of 2."""
    items = [str(number) for number in range(limit)]
    return Predictions(run, subject, "t", {"limit": limit}, items, 2, CODE, ["length"])


def answer(found, until=None):
    """Open, answer what is wanting, up to so many; how many were there, and what was said."""
    done, said = found.open()
    for start in range(done, until or len(found.items), found.chunk):
        chunk = found.items[start : start + found.chunk]
        found.append([Answer(item, {"length": 9}, {"acc": True}) for item in chunk])
    return done, said


def no_say(line):
    raise AssertionError(line)


def test_answers_that_were_moved_away_are_taken_back(tmp_path):
    answer(answers_to(tmp_path, 4))
    before = answers_to(tmp_path, 4).path.read_bytes()
    done, said = answer(answers_to(tmp_path, 3))
    assert done == 0
    assert "t of a: answered anew, since its settings changed (limit: 4 -> 3)" in said
    done, said = answer(answers_to(tmp_path, 4))
    assert done == 4
    assert "limit: 3 -> 4" in said and "answered with the same settings before" in said
    assert "anew" not in said
    assert answers_to(tmp_path, 4).path.read_bytes() == before
    assert len(list((tmp_path / "replaced").rglob("*.jsonl"))) == 1  # the three
    assert answer(answers_to(tmp_path, 3))[0] == 3


def test_a_part_that_was_moved_away_is_gone_on_with(tmp_path):
    answer(answers_to(tmp_path, 4), until=2)
    answer(answers_to(tmp_path, 3))
    done, said = answer(answers_to(tmp_path, 4))
    assert done == 2 and "goes on after 2 of 4" in said


def test_fewer_answers_never_replace_complete_ones(tmp_path):
    whole, other = answers_to(tmp_path, 4), answers_to(tmp_path, 3)
    answer(whole)
    kept = {path: path.read_bytes() for path in (whole.path, whole.description)}
    other.open()
    for (
        path,
        content,
    ) in kept.items():  # as an earlier release left them: begun anew, and broken off
        path.write_bytes(b"".join(content.splitlines(True)[:2]) if path == whole.path else content)
    other.open()
    found = {
        len(path.read_bytes().splitlines()) for path in (tmp_path / "replaced").rglob("*.jsonl")
    }
    assert found == {2, 4}
    assert whole.open()[0] == 4


def test_complete_answers_are_taken_in_place_of_a_part(tmp_path):
    whole = answers_to(tmp_path / "old", 4)
    answer(whole)
    part = answers_to(tmp_path / "new", 4)
    answer(part, until=2)
    done, said = part.open(finished(tmp_path / "old", no_say))
    assert done == 4 and f"in {tmp_path / 'old'}" in said
    assert part.path.read_bytes() == whole.path.read_bytes()
    assert whole.path.exists()


def test_answers_of_another_name_are_copied_back(tmp_path):
    answer(answers_to(tmp_path, 4, subject="a"))
    answers_to(tmp_path, 3, subject="a").open()
    assert answers_to(tmp_path, 4, subject="b").open()[0] == 4
    assert answers_to(tmp_path, 4, subject="a").open()[0] == 4


def test_a_kill_between_any_two_changes_loses_no_answer(tmp_path, monkeypatch):
    """Kill before the nth time that a file is renamed or removed, till there is no nth time."""
    real = {name: getattr(Path, name) for name in ("replace", "unlink")}
    for number in itertools.count():
        run, left = tmp_path / str(number), [number]
        answer(answers_to(run, 4))

        def counted(name, left=left):
            def change(path, *more, **named):
                if not left[0]:
                    raise Killed
                left[0] -= 1
                return real[name](path, *more, **named)

            return change

        try:
            with monkeypatch.context() as patch:
                for name in real:
                    patch.setattr(Path, name, counted(name))
                answers_to(run, 3).open()
                answers_to(run, 4).open()
        except Killed:
            killed = True
        else:
            killed = False
        if number % 2:
            answers_to(run, 3).open()
        assert answers_to(run, 4).open()[0] == 4, number
        if not killed:
            break
    assert number > 6


def test_a_damaged_source_is_passed_over_and_named(tmp_path):
    for name in ("1", "2"):
        answer(answers_to(tmp_path / "old" / name, 4))
    first = answers_to(tmp_path / "old/1", 4).path
    first.write_bytes(first.read_bytes().replace(b'"scores"', b'"score"', 1))
    known = finished(tmp_path / "old", no_say)
    done, said = answers_to(tmp_path / "new", 4).open(known)
    assert done == 4
    assert f"not used: {first}:1" in said and f"in {tmp_path / 'old/2'}" in said
    second = answers_to(tmp_path / "old/2", 4).path
    second.unlink()
    new = answers_to(tmp_path / "newer", 4)
    assert new.open(known)[0] == 0
    assert not new.path.exists()


def test_damaged_descriptions_below_a_reused_folder_are_told_and_passed_over(tmp_path):
    for name in ("1", "2"):
        answer(answers_to(tmp_path / name, 4))
    damaged = answers_to(tmp_path / "1", 4).description
    damaged.write_text("{")
    said = []
    known = finished(tmp_path, said.append)
    assert known == {answers_to(tmp_path, 4).digest: [answers_to(tmp_path / "2", 4).path]}
    assert len(said) == 1 and str(damaged) in said[0]


@pytest.mark.parametrize(("name", "what"), [("none", "not there"), ("file", "a file")])
def test_a_place_to_reuse_that_is_no_folder_is_refused(tmp_path, name, what):
    (tmp_path / "file").touch()
    with pytest.raises(EvaluationError, match=f"{name} is {what}"):
        finished(tmp_path / name, no_say)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scores": None}, "scores"),
        ({"scores": "good"}, "scores"),
        ({"scores": {}}, "scores"),
        ({"scores": {"acc": None}}, "acc must be true or false"),
        ({"scores": {"acc": "yes"}}, "acc must be true or false"),
        ({"scores": {"acc": [1, 0]}}, "acc must be true or false"),
        ({"scores": {"acc": float("nan")}}, "finite number"),
        ({"said": {}}, "length is missing"),
        ({"said": None}, "said"),
        ({"item": 1}, "item"),
        (None, "not as kvfold writes it"),
    ],
)
def test_an_answer_that_is_none_is_named_by_line(tmp_path, change, words):
    found = answers_to(tmp_path, 4)
    answer(found)
    lines = found.path.read_text().splitlines(keepends=True)
    lines[2] = json.dumps(None if change is None else json.loads(lines[2]) | change) + "\n"
    found.path.write_text("".join(lines))
    with pytest.raises(EvaluationError, match=rf"t\.jsonl:3 .*{words}.*delete it"):
        found.open()
    with pytest.raises(EvaluationError, match=rf"t\.jsonl:3 .*{words}.*delete it"):
        found.read()


def test_numbers_lists_and_truths_are_scores(tmp_path):
    found = answers_to(tmp_path, 2)
    found.open()
    scores = {"acc": True, "parts": [True, False], "none": [], "size": 1.5, "count": 3}
    found.append([Answer(item, {"length": 9}, scores) for item in found.items])
    assert [answer.scores for answer in found.read()] == [scores, scores]


def test_a_folder_in_place_of_answers_is_named(tmp_path):
    found = answers_to(tmp_path, 4)
    answer(found)
    found.path.unlink()
    found.path.mkdir()
    with pytest.raises(EvaluationError, match=r"t\.jsonl must be a file of answers"):
        found.open()


@pytest.mark.parametrize("changes", ["truncate", "replace"])
def test_what_can_not_be_written_is_named(tmp_path, monkeypatch, changes):
    found = answers_to(tmp_path, 4)
    answer(found)
    found.path.write_bytes(found.path.read_bytes()[:-1])

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(predictions.os, "truncate", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    asked = found if changes == "truncate" else answers_to(tmp_path, 3)
    with pytest.raises(ReportError, match=r"can't .*: Permission denied"):
        asked.open()
