"""Needles stand where they should, and a model that reads them finds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvfold.errors import EvaluationError
from kvfold.evaluation.metrics import task_figures
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.share import wilson
from kvfold.evaluation.tasks.needle import DEPTHS, EACH, find_needles, make, needles
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Subject

HAYSTACK = "The grass was green and the sky was blue, and nothing happened for a while. " * 60


def test_prompts_have_the_length_and_hold_the_needle_at_its_depth(smollm2: Any) -> None:
    _, tokenizer = smollm2
    made = needles(HAYSTACK, tokenizer, length=256, depths=(0.0, 0.5, 1.0), each=2)
    assert [len(needle.ids) for needle in made] == [256] * 6
    for needle in made:
        text = tokenizer.decode(needle.ids)
        assert text.count(needle.answer) == 1
        place = text.index(needle.answer) / len(text)
        assert place == pytest.approx(0.05 + 0.9 * needle.depth, abs=0.08)


def test_the_same_seed_draws_the_same_needles(smollm2: Any) -> None:
    _, tokenizer = smollm2
    settings: dict[str, Any] = {"length": 128, "depths": (0.3,), "each": 3}
    one, same, other = (needles(HAYSTACK, tokenizer, **settings, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(one, same, strict=True))
    assert [n.answer for n in one] != [n.answer for n in other]


def test_a_model_that_reads_the_needle_finds_it(smollm2: Any) -> None:
    model, tokenizer = smollm2
    made = needles(HAYSTACK, tokenizer, length=160, depths=(0.2, 0.8), each=3)
    assert sum(find_needles(model, made, tokenizer)) >= 4
    blind = [needle.__class__(needle.ids[-12:], needle.answer, needle.depth) for needle in made]
    assert sum(find_needles(model, blind, tokenizer)) == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"length": 10**6}, "haystack must have"),
        ({"length": 16}, "room for needle"),
        ({"length": 128, "depths": (1.5,)}, "from 0 to 1"),
    ],
)
def test_prompts_that_cant_be_are_refused(
    smollm2: Any, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(EvaluationError, match=match):
        needles(HAYSTACK, smollm2[1], **{"depths": (0.5,), "each": 1, **settings})


def test_the_grid_says_where_each_needle_stood(data: Any, characters: Any, scripted: Any) -> None:
    settings = TaskSettings(data, tokenizer=characters, lengths=(128, 160), seed=3)
    task = make(settings)
    assert len(task.items()) == 2 * len(DEPTHS) * EACH
    known = {
        tuple(item["ids"]): characters(f" {item['answer']}. So").input_ids
        for item in task.items()
        if item["depth"] < 0.7
    }
    found = task.answers(Subject("script", scripted(known), characters), task.items())
    for answer, item in zip(found, task.items(), strict=True):
        assert answer.scores["accuracy"] is (item["depth"] < 0.7)
        assert (answer.said["depth"], answer.said["length"]) == (item["depth"], item["length"])
    figures = task_figures(task, {PLAIN: found}, seed=0)[PLAIN]
    assert figures["accuracy/length 128"].value == figures["accuracy/length 160"].value == 0.6
    by_depth = [figures[f"accuracy/depth {depth}"] for depth in DEPTHS]
    assert [figure.value for figure in by_depth] == [1, 1, 1, 0, 0]
    assert by_depth[0].interval == pytest.approx(wilson(1.0, 2 * EACH))


def test_each_length_has_needles_of_its_own(smollm2: Any, tmp_path: Any) -> None:
    (tmp_path / "book.txt").write_text(HAYSTACK)
    _, tokenizer = smollm2
    settings = TaskSettings(tmp_path / "book.txt", tokenizer=tokenizer, lengths=(128, 256))
    said = {item["length"]: set() for item in make(settings).items()}
    for item in make(settings).items():
        said[item["length"]].add(item["answer"])
    assert not said[128] & said[256]
