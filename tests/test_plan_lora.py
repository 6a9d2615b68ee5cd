"""A plan's lora: what it stands for, and every way in which it can be wrong."""

from __future__ import annotations

import pytest

import kvfold
from kvfold.errors import PlanError
from kvfold.plan import Plan

POOL = {"method": "pool", "layers": [4, 2]}


def plan_with(lora, **axes):
    return Plan.from_dict({"sequence": [POOL], **axes, "lora": lora})


@pytest.fixture
def described(tiny_config):
    return kvfold.anatomy(tiny_config("llama"))


def test_it_serves_queries_and_outputs_of_every_layer_that_an_axis_names():
    bits = [{"method": "turboquant", "layers": [5]}]
    plan = plan_with({"rank": 4}, bits=bits)
    assert plan.lora.targets == ("q", "o")
    assert plan.lora_layers == (2, 4, 5)
    assert plan_with({"rank": 4, "layers": [3, 0]}).lora_layers == (0, 3)
    assert Plan().lora_layers == ()


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (8.0, 2.0), (2, 0.5)])
def test_what_is_added_is_scaled_by_alpha_over_rank_with_twice_the_rank_for_none(alpha, scale):
    assert plan_with({"rank": 4, "alpha": alpha}).lora.scale == scale


def test_a_plan_without_it_is_written_as_before_there_was_one():
    plan = Plan.from_dict({"sequence": [POOL]})
    assert "lora" not in plan.to_dict()
    assert "lora" not in plan.to_json() + plan.to_yaml()
    assert plan_with({"rank": 4}).replace(lora=None) == plan


def test_the_yardstick_without_history_has_none():
    assert plan_with({"rank": 4}, window=8).without_history().lora is None


@pytest.mark.parametrize(
    ("lora", "names"),
    [
        ({}, r"lora\.rank"),
        ({"rank": 0}, r"lora\.rank.*got 0"),
        ({"rank": 4, "alpha": 0}, r"lora\.alpha.*got 0"),
        ({"rank": 4, "alpha": float("inf")}, r"lora\.alpha.*got inf"),
        ({"rank": 4, "targets": []}, r"lora\.targets"),
        ({"rank": 4, "targets": ["gate"]}, r"lora\.targets.*got 'gate'"),
        ({"rank": 4, "targets": ["q", "q"]}, "targets name a projection twice"),
        ({"rank": 4, "layers": []}, r"lora\.layers"),
        ({"rank": 4, "dropout": 0.1}, r"unknown key lora\.dropout"),
        (4, "lora"),
    ],
)
def test_bad_data_is_refused_by_name(lora, names):
    with pytest.raises(PlanError, match=names):
        plan_with(lora)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 4, "layers": [6]}, "lora names layer 6, but the model has layers 0 to 5"),
        ({"rank": 4, "layers": [-1]}, "lora names layer -1"),
        ({"rank": 4, "layers": [3, 3]}, "lora names a layer twice"),
        ({"rank": 33}, "rank must be at most 32, .* projection q of layer 2; got 33; lower it"),
    ],
)
def test_what_a_model_has_not_is_refused(described, lora, message):
    with pytest.raises(PlanError, match=message):
        plan_with(lora).check(described)


def test_without_layers_of_its_own_it_needs_a_plan_that_names_some(described):
    plan = Plan.from_dict({"lora": {"rank": 4}})
    with pytest.raises(PlanError, match="the plan names none; give lora its own layers"):
        plan.check(described)
    plan.replace(lora={"rank": 4, "layers": [0]}).check(described)


def test_linear_attention_has_no_such_projections_but_sliding_attention_has(tiny_config):
    lora = {"lora": {"rank": 4, "layers": [0]}}
    with pytest.raises(PlanError, match=r"layer 0, .* linear_attention .*q, o: \[3, 7\]"):
        Plan.from_dict(lora).check(kvfold.anatomy(tiny_config("qwen3_5")))
    sliding = kvfold.anatomy(tiny_config("gemma3"))
    assert sliding.layers[0].kind == "sliding_attention"
    Plan.from_dict(lora).check(sliding)
