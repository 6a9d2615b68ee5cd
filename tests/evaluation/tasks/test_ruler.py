"""Prompts hold what is asked for, and outputs are scored as the paper scores them."""

from __future__ import annotations

import json
import re

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.metrics import task_figures
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.tasks import ruler
from kvfold.evaluation.tasks.files import data_file
from kvfold.evaluation.tasks.ruler_prompts import (
    COMMON,
    HOPS,
    KINDS,
    NEEDLES,
    WordLists,
    ruler_prompt,
    share_said,
    word_list,
)
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Subject

LENGTH = 1500


@pytest.fixture(scope="module")
def words(data):
    settings = TaskSettings(data)
    files = [data_file(settings, f"wonderwords/{name}.txt") for name in ruler.LISTS]
    return WordLists(*(word_list(file) for file in files))


@pytest.fixture
def prompt(words, characters):
    """`prompt(kind)`: a prompt, and its text before the question."""

    def make(kind, name="0", length=LENGTH):
        made = ruler_prompt(kind, name, length, words, characters)
        return made, characters.decode(made.ids).rpartition("\nQuestion:")[0]

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [720, 1501])
def test_prompts_have_exactly_the_length_and_all_answers_in_them(prompt, kind, length):
    made, before = prompt(kind, length=length)
    assert len(made.ids) == length
    assert all(answer in before for answer in made.answers)
    assert prompt(kind, length=length)[0] == made
    assert prompt(kind, "1", length)[0].answers != made.answers


@pytest.mark.parametrize(
    ("kind", "keys", "values"),
    [("niah_single", 1, 1), ("niah_multikey", NEEDLES, 1), ("niah_multivalue", 1, NEEDLES)],
)
def test_needles_are_whole_and_the_question_is_about_one_key(
    prompt, characters, kind, keys, values
):
    made, before = prompt(kind)
    found = re.findall(r"special number of the (\w+ \w+) is (\d{7})\.", before)
    assert len({key for key, _ in found}) == keys
    assert len(found) == keys * values
    asked = characters.decode(made.ids).rpartition("of the ")[2].rsplit(" ", 1)[0]
    assert {number for key, number in found if key == asked} == set(made.answers)


def test_a_chain_of_variables_is_told_in_its_order(prompt):
    made, before = prompt("variable_tracking")
    body = before.split("\n", 2)[2]
    told = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", body)
    assert [name for name, _ in told] == list(made.answers)
    assert [of for _, of in told[1:]] == list(made.answers[:-1])
    assert len(told) == HOPS + 1


def test_common_words_are_far_more_common_than_all_others(prompt):
    made, before = prompt("common_words")
    listed = re.findall(r" (\w+),", before)
    counts = {word: listed.count(word) for word in listed}
    assert len(made.answers) == COMMON
    assert min(counts[word] for word in made.answers) >= 4
    assert max(n for word, n in counts.items() if word not in made.answers) == 1


def test_a_length_without_room_is_refused(prompt, words, characters):
    with pytest.raises(EvaluationError, match=r"niah_multikey needs more than \d+ tokens"):
        prompt("niah_multikey", length=100)
    few = WordLists(words.nouns[:COMMON], (), ())
    with pytest.raises(EvaluationError, match="word lists must be long enough"):
        ruler_prompt("common_words", "0", 3000, few, characters)


def test_the_score_is_the_share_of_strings_that_occur():
    assert share_said("They are 12, 34 and FIG", ["12", "fig"]) == 1.0
    assert share_said("They are 12", ["12", "34", "5", "6"]) == 0.25
    assert share_said("", ["12"]) == 0.0


@pytest.mark.parametrize(("kept", "score"), [(1, 1.0), (2, 0.5)])
def test_what_is_said_is_scored_by_kind(data, characters, scripted, kept, score):
    task = ruler.make(TaskSettings(data, limit=10, tokenizer=characters, lengths=(720,)))
    multiple = [i for i in task.items() if len(i["answers"]) in (NEEDLES, COMMON)]
    known = {}
    for item in multiple:
        right = item["answers"][: len(item["answers"]) // kept]
        known[tuple(item["ids"])] = characters(f" {', '.join(right)}.").input_ids
    found = task.answers(Subject("script", scripted(known), characters), multiple)
    assert [answer.scores["score"] for answer in found] == [score] * len(multiple)
    figures = task_figures(task, {PLAIN: found}, seed=0)[PLAIN]
    assert figures["score/kind niah_multivalue"].value == score
    assert figures["score/kind common_words/length 720"].value == score
    silent = task.answers(Subject("silent", scripted({}), characters), multiple)
    assert {answer.scores["score"] for answer in silent} == {0.0}


def test_a_file_of_rulers_own_is_asked_line_by_line(tmp_path, characters, scripted):
    path = tmp_path / "uuids.jsonl"
    lines = [{"input": f"what is {n}" + " " * n, "outputs": [f"u-{n}", "v"]} for n in range(30)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    task = ruler.make_from_file(TaskSettings(path, tokenizer=characters))
    assert len(task.items()) == ruler.FILE_ITEMS
    assert task.settings()["of_lines"] == 30
    known = {tuple(item["ids"]): characters(" V, u-").input_ids for item in task.items()}
    found = task.answers(Subject("script", scripted(known), characters), task.items())
    assert {answer.scores["score"] for answer in found} == {0.5}
    assert len({answer.item for answer in found}) == ruler.FILE_ITEMS


def test_the_file_that_comes_with_the_data_can_be_asked(data_folder, characters):
    task = ruler.make_from_file(TaskSettings(data_folder, limit=2, tokenizer=characters))
    assert [len(item["answers"]) for item in task.items()] == [1, 1]
    assert all("magic uuid" in characters.decode(item["ids"]) for item in task.items())


def test_the_tiny_language_is_refused(data):
    from kvfold.models import load_tokenizer

    with pytest.raises(EvaluationError, match="asks in English"):
        ruler.make(TaskSettings(data, tokenizer=load_tokenizer("tiny-hybrid")))


def test_one_file_in_place_of_the_word_lists_is_refused(byte_tokenizer, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("bread\nrain\n")
    with pytest.raises(EvaluationError, match=r"needs 3 files.*words\.txt; name the folder"):
        ruler.make(TaskSettings(path, tokenizer=byte_tokenizer))


def test_each_length_is_asked_for_other_strings(data, characters):
    made = ruler.make(TaskSettings(data, tokenizer=characters, lengths=(1500, 1700)))
    asked = {}
    for item in made.items():
        asked.setdefault((item["kind"], item["length"]), set()).update(item["answers"])
    for kind in KINDS:
        if kind.startswith("niah"):
            assert not asked[kind, 1500] & asked[kind, 1700]
        assert asked[kind, 1500] != asked[kind, 1700]
