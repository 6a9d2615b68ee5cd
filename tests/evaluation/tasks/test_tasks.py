"""What holds of every task of kvfold's own: the same items, item by item the same answers."""

from __future__ import annotations

import json

import pytest
import torch

from kvfold import attach
from kvfold.anatomy import anatomy
from kvfold.errors import EvaluationError
from kvfold.evaluation.metrics import task_figures
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.tasks.task import Subject
from kvfold.plan import Plan
from kvfold.presets import preset

SAME = 1e-5
"""Of figures near 5: linear attention runs in float32 whatever the model's dtype."""


def answers(task, model, tokenizer, items=None):
    items = task.items() if items is None else items
    return list(task.answers(Subject("subject", model, tokenizer), items))


def flat(value):
    """Every figure of plain data by its path."""
    if isinstance(value, dict):
        return {f"{k}.{n}": v for k, own in value.items() for n, v in flat(own).items()}
    if isinstance(value, list | tuple):
        return {f"{k}.{n}": v for k, own in enumerate(value) for n, v in flat(own).items()}
    return {"": value}


def assert_same(found, expected):
    assert [answer.item for answer in found] == [answer.item for answer in expected]
    for one, other in zip(found, expected, strict=True):
        one, other = flat(one.to_dict()), flat(other.to_dict())
        assert one.keys() == other.keys()
        for name, value in other.items():
            close = pytest.approx(value, abs=SAME) if isinstance(value, float) else value
            assert one[name] == close, name


def test_items_are_the_same_each_time_and_plain_data(any_task):
    one, again = any_task(), any_task()
    assert json.loads(json.dumps(one.items())) == again.items()
    assert one.settings() == again.settings()
    assert one.items() is not None and len({item["id"] for item in one.items()}) == 3
    json.dumps(one.settings())
    assert one.settings()["items"] == 3


def test_settings_tell_other_items_apart(any_task):
    assert any_task().settings() != any_task(limit=2).settings()
    seeded = any_task(seed=5)
    if "seed" in seeded.settings():
        assert seeded.settings()["items_sha256"] != any_task().settings()["items_sha256"]


def test_a_part_of_the_items_is_some_of_all(any_task):
    every = {item["id"] for item in any_task(limit=None).items()}
    part = [item["id"] for item in any_task(limit=None, fraction=0.5).items()]
    assert set(part) < every
    assert len(part) == round(len(every) / 2)
    assert len(any_task(limit=1).items()) == 1


def test_an_answer_does_not_depend_on_the_items_beside_it(any_task, endless, characters):
    task, model = any_task(limit=2), endless("llama")
    alone = [answers(task, model, characters, [item])[0] for item in task.items()]
    together = answers(task, model, characters)
    assert_same(together, alone)
    found = task.summary(together)
    assert all(isinstance(value, float) and abs(value) < 1e9 for value in found.values())
    assert any("/" in name for name in task_figures(task, {PLAIN: together}, seed=0)[PLAIN])


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_add_on_that_folds_nothing_scores_as_the_plain_model(
    any_task, endless, characters, bare_addon, name
):
    task, model = any_task(limit=1), endless(name)
    plain = answers(task, model, characters)
    plan = preset("identity", anatomy(model)).replace(window=5000)
    with attach(model, bare_addon(model, plan)):
        assert_same(answers(task, model, characters), plain)


@pytest.mark.parametrize("attention", ["folded", "exact"])
def test_a_prompt_may_skip_layers(any_task, endless, characters, bare_addon, attention):
    model = endless("llama")
    plan = Plan.from_dict(
        {
            "anchors": 2,
            "window": 6,
            "prefill": "skip",
            "prefill_attention": attention,
            "replay": 16,
            "depth": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}],
        }
    )
    task = any_task(limit=1)
    with attach(model, bare_addon(model, plan)):
        found = answers(task, model, characters)
    assert [answer.item for answer in found] == [item["id"] for item in task.items()]
    figures = [v for a in found for v in flat(a.scores).values()]
    assert all(torch.tensor(float(v)).isfinite() for v in figures)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"fraction": 0.0}, "above 0 and at most 1"),
        ({"fraction": 1.5}, "above 0 and at most 1"),
        ({"limit": 0}, "at least 1 item"),
        ({"tokenizer": None}, "needs a tokenizer"),
    ],
)
def test_settings_that_cant_be_are_refused(any_task, settings, match):
    with pytest.raises(EvaluationError, match=match):
        any_task(**settings)


def test_lengths_without_room_are_refused(any_task):
    with pytest.raises(EvaluationError, match="must have"):
        any_task(lengths=(1,))
