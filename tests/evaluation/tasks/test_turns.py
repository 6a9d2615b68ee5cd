"""Conversations ask for what was told before, and the two ways to feed one are compared."""

from __future__ import annotations

import pytest
import torch

from kvfold import attach
from kvfold.errors import EvaluationError
from kvfold.evaluation.metrics import task_figures
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.tasks import turns
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Subject
from kvfold.models import load, load_tokenizer
from kvfold.plan import Plan

LENGTH = 150


@pytest.fixture
def task(data, characters):
    return turns.make(TaskSettings(data, limit=3, tokenizer=characters, lengths=(LENGTH,)))


def script(item, characters, wrong=()):
    """Every turn's answer by the conversation up to there; other numbers at the wrong turns."""
    known, seen = {}, []
    for number, ids in enumerate(item["turns"]):
        seen = seen + ids
        if number:
            question = item["questions"][number - 1]
            said = "00000" if number in wrong else question["answer"]
            known[tuple(seen)] = characters(f" {said}. And so it is, as we said.").input_ids
    return known


def test_every_question_is_about_an_earlier_turn_and_answered_in_the_next(task, characters):
    for item in task.items():
        assert [len(ids) for ids in item["turns"]] == [LENGTH] * turns.TURNS
        texts = [characters.decode(ids) for ids in item["turns"]]
        for question in item["questions"]:
            turn, answer = question["turn"], question["answer"]
            assert question["of"] < turn
            asked = texts[turn].rpartition("\n")[2]
            assert f"{asked} {answer}." in texts[question["of"]]
            assert turn + 1 == turns.TURNS or texts[turn + 1].startswith(f" {answer}.\n")


def test_right_answers_are_right_and_wrong_ones_wrong(task, characters, scripted):
    known = {}
    for item in task.items():
        known |= script(item, characters, wrong=(3,))
    found = task.answers(Subject("script", scripted(known), characters), task.items())
    for answer in found:
        assert answer.scores["recalled"] == [True, True, False, True, True]
        assert answer.scores["same_text"] is True
        assert answer.scores["agreed_tokens"] == turns.NEW_TOKENS
        assert answer.scores["recalled/turn 3"] == [False]
        assert answer.scores["recalled/turn 4"] == [True]
        ago = [v for n, v in answer.scores.items() if n.endswith("turns ago")]
        assert sum(map(len, ago)) == 5 and sum(map(sum, ago)) == 4
    figures = task_figures(task, {PLAIN: found}, seed=0)[PLAIN]
    assert figures["recalled/turn 3"].count == 3
    assert all(f.count for name, f in figures.items() if name.endswith("ago"))


def test_another_text_at_once_is_told_by_where_it_differs(task, characters, scripted):
    item = task.items()[0]
    whole = tuple(token for ids in item["turns"] for token in ids)

    class Forgetful(scripted):
        def forward(self, input_ids, cache=None, **rest):
            made = super().forward(input_ids, cache, **rest)
            if cache is None and input_ids.shape[1] == len(whole):
                made.cache[0][:] = [0]
            return made

        __call__ = forward

    model = Forgetful(script(item, characters))
    (answer,) = task.answers(Subject("forgetful", model, characters), [item])
    assert answer.scores["same_text"] is False
    assert answer.scores["agreed_tokens"] == 1.0


def test_a_folded_cache_says_the_same_however_it_was_fed(task, endless, characters, bare_addon):
    model = endless("llama")
    plan = {"anchors": 2, "window": 8, "depth": [{"method": "latent", "layers": [3, 4], "rank": 8}]}
    with attach(model, bare_addon(model, Plan.from_dict(plan))):
        (answer,) = task.answers(Subject("folded", model, characters), task.items()[:1])
    assert answer.scores["same_text"] is True


def test_the_tiny_hybrid_remembers_what_it_was_told():
    model, tokenizer = load("tiny-hybrid", dtype=torch.float32)
    task = turns.make(TaskSettings(None, limit=2, tokenizer=tokenizer, lengths=(64,)))
    assert [len(ids) for ids in task.items()[0]["turns"]] == [64] * turns.TURNS
    found = task.answers(Subject("plain", model, tokenizer), task.items())
    assert sum(sum(answer.scores["recalled"]) for answer in found) >= 9
    assert all(answer.scores["same_text"] for answer in found)


def test_turns_without_room_are_refused(data, characters):
    for tokenizer, source in ((characters, data), (load_tokenizer("tiny-hybrid"), None)):
        settings = TaskSettings(source, tokenizer=tokenizer, lengths=(8,))
        with pytest.raises(EvaluationError, match="a turn must have room"):
            turns.make(settings)
    with pytest.raises(EvaluationError, match="2 to 8 turns; got 9"):
        turns.TurnsSettings(turns=9)


def test_each_length_tells_facts_of_its_own(data, characters):
    made = turns.make(TaskSettings(data, tokenizer=characters, lengths=(LENGTH, 2 * LENGTH)))
    told = {LENGTH: set(), 2 * LENGTH: set()}
    for item in made.items():
        told[item["length"]].update(question["answer"] for question in item["questions"])
    assert all(told.values())
    assert not told[LENGTH] & told[2 * LENGTH]
