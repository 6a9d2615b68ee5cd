"""Budgets: bytes of history by arithmetic, and the plans that are chosen for them."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold
from kvfold.budget import (
    LADDERS,
    history_bytes,
    layer_groups,
    operations_left,
    plain_history_bytes,
    slot_bytes,
)
from kvfold.errors import PlanError
from kvfold.evaluation.memory import history_bytes_per_token
from kvfold.methods import Bits, CodePart
from kvfold.plan import Plan
from kvfold.presets import PRESETS, preset


def dense(**changes):
    from transformers import LlamaConfig

    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    return kvfold.anatomy(LlamaConfig(**{"hidden_size": 576, **shape, **changes}))


def hybrid():
    from transformers import Qwen3_5TextConfig

    return kvfold.anatomy(
        Qwen3_5TextConfig(
            hidden_size=2560,
            num_hidden_layers=32,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=256,
        )
    )


SHAPES = {"dense": dense(), "hybrid": hybrid()}


def presets_of(described):
    for name in PRESETS:
        try:
            yield name, preset(name, described)
        except PlanError:
            continue


@pytest.fixture(params=["dense", "hybrid"])
def shape(request):
    return SHAPES[request.param]


def test_arithmetic_equals_the_predicted_cache_for_every_preset_and_family(tiny_config, family):
    described = kvfold.anatomy(tiny_config(family))
    made = dict(presets_of(described))
    assert len(made) >= len(PRESETS) - 2
    for name, plan in made.items():
        counted = history_bytes_per_token(plan, described)
        assert history_bytes(plan, described) == pytest.approx(counted, rel=0.01), name


def test_arithmetic_equals_the_predicted_cache_on_real_shapes(shape):
    for name, plan in presets_of(shape):
        counted = history_bytes_per_token(plan, shape)
        assert history_bytes(plan, shape) == pytest.approx(counted, rel=0.01), name


@pytest.mark.parametrize(
    "axes",
    [
        {"depth": [{"method": "latent", "layers": [0, 1], "rank": 24, "value_rank": 9}]},
        {"depth": [{"method": "ced", "split": 2, "layers": [4, 5]}]},
        {"depth": [{"method": "csa2", "source": 1, "readers": [2, 3], "value_source": 0}]},
        {
            "depth": [
                {"method": "ced", "split": 1, "layers": [2]},
                {"method": "csa2", "source": 2, "readers": [3, 4]},
            ]
        },
        {"depth": [{"method": "drop", "layers": [0, 5]}]},
        {"sequence": [{"method": "pool", "layers": [0, 2], "group": 8, "gate": "channel"}]},
    ],
)
@pytest.mark.parametrize("bits", [None, (8, 4), (3, 5)])
def test_arithmetic_holds_for_every_method_and_composition(tiny_config, axes, bits):
    described = kvfold.anatomy(tiny_config("llama"))
    layers = list(Plan.from_dict(axes).folded_layers)
    dropped = any(entry["method"] == "drop" for entry in axes.get("depth", ()))
    if bits is not None and not dropped:
        entry = {"key_bits": bits[0], "value_bits": bits[1], "layers": layers}
        axes = {**axes, "bits": [{"method": "turboquant", **entry}]}
    if "depth" in axes and not dropped:
        axes = {"sequence": [{"method": "pool", "layers": layers, "group": 2}], **axes}
    plan = Plan.from_dict(axes)
    counted = history_bytes_per_token(plan, described)
    assert history_bytes(plan, described) == pytest.approx(counted, rel=0.01)


def test_a_quantised_vector_costs_its_row_and_a_two_byte_scale():
    parts = (CodePart("keys", 3, 64), CodePart("values", 3, 64))
    assert slot_bytes(parts, None) == 6 * 64 * 2
    assert slot_bytes(parts, Bits(8, 4, 0)) == 3 * (64 + 2) + 3 * (32 + 2)
    assert slot_bytes((CodePart("both", 1, 240),), Bits(8, 4, 0)) == 242


def test_only_full_attention_layers_count(tiny_config):
    described = kvfold.anatomy(tiny_config("gemma3"))  # 4 of 6 layers attend to everything
    assert plain_history_bytes(described) == 4 * 2 * 32 * 2


@settings(deadline=None)
@given(st.sampled_from(["dense", "hybrid"]), st.floats(1.0001, 64.0))
def test_every_budget_in_reach_is_met(kind, times):
    described = SHAPES[kind]
    plan = Plan.for_budget(described, times_smaller=times)
    assert history_bytes(plan, described) <= plain_history_bytes(described) / times * (1 + 1e-9)
    assert plan.folded_layers == described.foldable_layers


@settings(deadline=None)
@given(st.sampled_from(["dense", "hybrid"]), st.floats(2.7, 64.0))
def test_a_budget_is_used_up_where_a_rank_can_be_chosen(kind, times):
    described = SHAPES[kind]
    plan = Plan.for_budget(described, times_smaller=times)
    used = history_bytes(plan, described) * times / plain_history_bytes(described)
    assert used > 0.96


def test_both_ways_to_name_a_budget_give_the_same_plan(shape):
    plain = plain_history_bytes(shape)
    for times in (1.5, 2.5, 4, 10, 20, 50):
        by_bytes = Plan.for_budget(shape, bytes_per_token=plain / times)
        assert by_bytes == Plan.for_budget(shape, times_smaller=times)


def test_a_plans_own_bytes_are_a_budget_that_it_meets(shape):
    for times in (1.5, 2.5, 3.3, 7, 30):
        plan = Plan.for_budget(shape, times_smaller=times)
        cost = history_bytes(plan, shape)
        assert Plan.for_budget(shape, bytes_per_token=cost) == plan
        assert history_bytes(Plan.for_budget(shape, bytes_per_token=cost - 1), shape) < cost


def test_the_ladder_is_climbed_down_as_the_budget_shrinks(shape):
    axes = []
    for times in (1.9, 2.5, 8, 40):
        plan = Plan.for_budget(shape, times_smaller=times)
        axes.append((bool(plan.depth), bool(plan.sequence), bool(plan.bits)))
    assert axes[0] == axes[1] == (False, False, True)
    assert axes[2] == (True, False, True)
    assert axes[3] == (True, True, True)


def test_the_presets_are_budgets(shape):
    for times in (4, 8, 16):
        assert preset(f"{times}x", shape) == Plan.for_budget(shape, times_smaller=times)


def test_ladders_are_ordered_by_how_far_they_reach():
    for ladder in LADDERS.values():
        limits = [rung.most_times_smaller for rung in ladder if rung.layers_per_code]
        assert limits == sorted(limits)
        assert all(math.isinf(r.most_times_smaller) for r in ladder if not r.layers_per_code)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({}, "exactly one of"),
        ({"times_smaller": 4, "bytes_per_token": 100}, "exactly one of"),
        ({"times_smaller": 0}, "finite number above 0; got 0;"),
        ({"times_smaller": -3}, "finite number above 0; got -3;"),
        ({"times_smaller": math.nan}, "finite number above 0; got nan;"),
        ({"bytes_per_token": math.inf}, "finite number above 0; got inf;"),
        ({"times_smaller": True}, "finite number above 0; got True;"),
        ({"times_smaller": "8"}, "finite number above 0; got '8';"),
        ({"times_smaller": 1}, "below the plain cache's 23,040 bytes a token"),
        ({"times_smaller": 0.5}, "below the plain cache's 23,040 bytes a token"),
        ({"bytes_per_token": 23_040}, "below the plain cache's 23,040 bytes a token"),
        ({"times_smaller": 1e9}, "must be able to shrink to the budget"),
        ({"bytes_per_token": 1}, r"got 1 bytes a token \(2.3e\+04 times smaller\)"),
    ],
)
def test_what_is_no_budget_is_refused(budget, words):
    with pytest.raises(PlanError, match=words):
        Plan.for_budget(SHAPES["dense"], **budget)


@pytest.mark.parametrize("budget", [{"times_smaller": 1e6}, {"bytes_per_token": 1e9}])
def test_a_refusal_names_budgets_that_can_be_met(shape, budget):
    with pytest.raises(PlanError) as refusal:
        Plan.for_budget(shape, **budget)
    offered = re.search(
        r"ask for ([\d,]+) to ([\d,]+) bytes a token, so for up to ([\d.]+) times",
        str(refusal.value),
    )
    least, most = (int(offered[n].replace(",", "")) for n in (1, 2))
    for allowed in (least, most):
        assert history_bytes(Plan.for_budget(shape, bytes_per_token=allowed), shape) <= allowed
    Plan.for_budget(shape, times_smaller=float(offered[3]))
    with pytest.raises(PlanError):
        Plan.for_budget(shape, bytes_per_token=least - 1)


def test_tiny_models_are_offered_only_what_they_reach(tiny_config, family):
    described = kvfold.anatomy(tiny_config(family))
    with pytest.raises(PlanError) as refusal:
        Plan.for_budget(described, times_smaller=1e6)
    least = int(re.search(r"ask for ([\d,]+) to", str(refusal.value))[1].replace(",", ""))
    plan = Plan.for_budget(described, bytes_per_token=least)
    assert history_bytes(plan, described) <= least


def test_a_model_without_full_attention_has_no_budget(tiny_config):
    windowed = kvfold.anatomy(tiny_config("mistral", sliding_window=8))
    with pytest.raises(PlanError, match=r"full-attention layers, .* at least one; it has none"):
        Plan.for_budget(windowed, times_smaller=4)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 9, 10, 11])
def test_groups_take_every_layer_once_and_leave_none_alone(count):
    groups = layer_groups(range(count), 5)
    assert [layer for group in groups for layer in group] == list(range(count))
    assert all(len(group) > 1 for group in groups) or count == 1
    assert max(map(len, groups)) <= 6


@pytest.mark.parametrize(
    ("split", "replay", "tokens", "left"),
    [(15, 256, 2048, 0.5625), (10, 512, 1024, 2 / 3), (20, 128, 128, 1.0), (15, 256, 100, 1.0)],
)
def test_a_skipped_prompts_work_is_that_of_the_lower_layers_and_of_the_replay(
    split, replay, tokens, left
):
    entry = {"method": "ced", "split": split, "layers": list(range(split, 30))}
    plan = Plan.from_dict({"depth": [entry], "prefill": "skip", "replay": replay})
    assert operations_left(plan, dense(), tokens) == pytest.approx(left)
    assert operations_left(plan.replace(prefill="full"), dense(), tokens) == 1.0
