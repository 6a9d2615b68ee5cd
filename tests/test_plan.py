"""Plans: round trips, and every way in which one can be wrong."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold
from kvfold.errors import PlanError
from kvfold.plan import Ced, Csa2, Plan

layer_sets = st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True)
entries = st.one_of(
    st.fixed_dictionaries({"method": st.sampled_from(["identity", "drop"]), "layers": layer_sets}),
    st.fixed_dictionaries(
        {"method": st.just("ced"), "split": st.integers(0, 40), "layers": layer_sets},
        optional={"bias": st.booleans(), "normalize": st.booleans()},
    ),
    st.fixed_dictionaries(
        {"method": st.just("csa2"), "source": st.just(41), "readers": layer_sets},
        optional={
            "form": st.sampled_from(["joint", "separate"]),
            "residual_hidden": st.integers(0, 64),
            "value_source": st.none() | st.integers(42, 60),
        },
    ),
    st.fixed_dictionaries(
        {"method": st.just("latent"), "layers": layer_sets, "rank": st.integers(1, 99)},
        optional={
            "value_rank": st.none() | st.integers(1, 99),
            "split": st.none() | st.integers(0, 40),
        },
    ),
)
plans = st.fixed_dictionaries(
    {"depth": st.lists(entries, max_size=4)},
    optional={
        "anchors": st.integers(0, 64),
        "window": st.integers(0, 512),
        "prefill_attention": st.sampled_from(["exact", "folded"]),
        "resident": st.sampled_from(["auto", "expanded", "shared", "absorbed"]),
    },
)


def plan_of(*depth, **settings_):
    return Plan.from_dict({"depth": list(depth), **settings_})


@given(plans)
@settings(max_examples=100, deadline=None)
def test_a_plan_survives_yaml_json_and_plain_data(data):
    plan = Plan.from_dict(data)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_dict(plan.to_dict()) == plan
    assert json.loads(plan.to_json()) == yaml.safe_load(plan.to_yaml())
    assert hash(plan) == hash(Plan.from_dict(data))


def test_defaults_are_the_documented_ones():
    plan = Plan()
    assert (plan.anchors, plan.window) == (4, 128)
    assert (plan.prefill_attention, plan.resident) == ("folded", "auto")
    assert plan.folded_layers == ()


def test_a_plan_cannot_be_changed_in_place():
    plan = Plan()
    with pytest.raises(ValueError, match="frozen"):
        plan.window = 3


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"windw": 3}, "windw"),
        ({"depth": [{"method": "latent", "layers": [1], "rank": 2, "rnk": 3}]}, "rnk"),
        ({"depth": [{"method": "fold", "layers": [1]}]}, "fold"),
        ({"depth": [{"method": "latent", "layers": [1], "rank": 0}]}, "rank"),
        ({"depth": [{"method": "latent", "layers": [1]}]}, "rank"),
        ({"depth": [{"method": "ced", "split": 1, "layers": []}]}, "layers"),
        ({"depth": [{"method": "csa2", "source": 1, "readers": [1, 2]}]}, "reader"),
        (
            {"depth": [{"method": "csa2", "source": 1, "readers": [3], "value_source": 3}]},
            "layer 3 can't be source and reader",
        ),
        ({"depth": [{"method": "csa2", "source": 1, "readers": [3, 3]}]}, "twice"),
        ({"window": 10**30}, "window"),
        ({"window": True}, "window"),
        ({"anchors": "4"}, "anchors"),
        ({"depth": {"method": "identity", "layers": [1]}}, "list"),
        ({"anchors": -1}, "anchors"),
        ({"window": "wide"}, "window"),
        ({"version": 2}, "version"),
        ({"sequence": {"method": "pool"}}, "sequence"),
        ([], "mapping"),
        (None, "mapping"),
    ],
)
def test_bad_data_is_refused_by_name(data, names):
    with pytest.raises(PlanError, match=names):
        Plan.from_dict(data)


def test_an_unknown_key_is_named_with_its_value():
    with pytest.raises(PlanError, match=r"unknown key windw; got 3; remove it"):
        Plan.from_dict({"windw": 3})


def test_text_that_is_not_yaml_is_refused():
    with pytest.raises(PlanError, match="YAML"):
        Plan.from_yaml("depth: [")


def test_replace_validates_again():
    assert Plan().replace(window=5).window == 5
    with pytest.raises(PlanError, match="window"):
        Plan().replace(window=-1)


@pytest.fixture(scope="module")
def described(tiny_config):
    return kvfold.anatomy(tiny_config("llama"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"method": "identity", "layers": [6]}, "layers 0 to 5"),
        ({"method": "identity", "layers": [-1]}, "layers 0 to 5"),
        ({"method": "identity", "layers": [2, 2]}, "twice"),
        ({"method": "ced", "split": 4, "layers": [3, 5]}, "H_4"),
        ({"method": "latent", "layers": [3, 5], "rank": 8, "split": 4}, "H_4"),
        ({"method": "csa2", "source": 4, "readers": [3]}, "after their source"),
        ({"method": "csa2", "source": 1, "readers": [3], "value_source": 4}, "after their source"),
        ({"method": "latent", "layers": [0, 1], "rank": 129}, "at most 128"),
        ({"method": "latent", "layers": [0, 1], "rank": 65, "value_rank": 4}, "at most 64"),
        ({"method": "latent", "layers": [3, 5], "rank": 33, "split": 3}, "at most 32"),
    ],
)
def test_impossible_entries_are_refused_with_the_reason(described, entry, message):
    with pytest.raises(PlanError, match=message):
        plan_of(entry).check(described)


def test_layers_that_are_not_full_attention_are_refused(tiny_config):
    hybrid = kvfold.anatomy(tiny_config("qwen3_5"))
    with pytest.raises(PlanError, match=r"linear_attention.*\[3, 7\]"):
        plan_of({"method": "identity", "layers": [4]}).check(hybrid)
    gemma = kvfold.anatomy(tiny_config("gemma3"))
    with pytest.raises(PlanError, match="sliding_attention"):
        plan_of({"method": "identity", "layers": [0]}).check(gemma)


def test_a_layer_in_two_entries_is_refused(described):
    with pytest.raises(PlanError, match=r"layer 3 is in two entries \(ced and latent\)"):
        plan_of(
            {"method": "ced", "split": 3, "layers": [3]},
            {"method": "latent", "layers": [3, 4], "rank": 8},
        ).check(described)


def test_ced_may_feed_a_csa2_source_but_not_a_reader(described):
    csa2 = {"method": "csa2", "source": 3, "readers": [4, 5]}
    plan_of({"method": "ced", "split": 3, "layers": [3]}, csa2).check(described)
    with pytest.raises(PlanError, match=r"layer 4 is in two entries \(ced and csa2\)"):
        plan_of({"method": "ced", "split": 3, "layers": [4]}, csa2).check(described)


def test_ced_that_feeds_a_source_serves_nothing_else(described):
    csa2 = {"method": "csa2", "source": 3, "readers": [5]}
    with pytest.raises(PlanError, match=r"layers \[4\] are none"):
        plan_of({"method": "ced", "split": 3, "layers": [3, 4]}, csa2).check(described)
    split = {"method": "csa2", "source": 3, "value_source": 4, "readers": [5]}
    with pytest.raises(PlanError, match=r"all of its sources \[3, 4\]; got \[4\]"):
        plan_of({"method": "ced", "split": 3, "layers": [4]}, split).check(described)
    twice = [csa2, {"method": "csa2", "source": 3, "readers": [4]}]
    with pytest.raises(PlanError, match="layer 3 is in two entries"):
        plan_of({"method": "ced", "split": 3, "layers": [3]}, *twice).check(described)


def test_dropping_the_history_without_a_window_is_refused(described):
    plan = plan_of({"method": "drop", "layers": [3]}, window=0)
    with pytest.raises(PlanError, match="window of at least 1"):
        plan.check(described)


def test_without_history_drops_the_same_layers_and_keeps_the_window(described):
    plan = plan_of(
        {"method": "ced", "split": 3, "layers": [3]},
        {"method": "latent", "layers": [4, 5], "rank": 8},
        window=7,
        anchors=2,
    )
    dropped = plan.without_history()
    assert dropped.folded_layers == plan.folded_layers == (3, 4, 5)
    assert (dropped.window, dropped.anchors) == (7, 2)
    assert {entry.method for entry in dropped.depth} == {"drop"}
    assert plan.replace(window=0).without_history().window == 1


def test_layers_of_a_csa2_entry_include_its_sources():
    assert Csa2(source=1, readers=(3, 4), value_source=2).layers == (1, 2, 3, 4)
    assert Ced(split=1, layers=(3,)).layers == (3,)
