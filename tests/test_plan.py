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
pools = st.fixed_dictionaries(
    {"method": st.just("pool"), "layers": layer_sets},
    optional={
        "group": st.integers(1, 64),
        "gate": st.sampled_from(["mean", "token", "head", "channel"]),
        "gate_rank": st.integers(1, 99),
        "overlap": st.booleans(),
        "mass_bias": st.booleans(),
        "position": st.sampled_from(["mean", "first", "last"]),
    },
)
quantised = st.fixed_dictionaries(
    {"method": st.just("turboquant"), "layers": layer_sets},
    optional={
        "key_bits": st.integers(1, 8),
        "value_bits": st.integers(1, 8),
        "seed": st.integers(0, 2**31 - 1),
    },
)
loras = st.fixed_dictionaries(
    {"rank": st.integers(1, 99)},
    optional={
        "alpha": st.none() | st.floats(1e-3, 1e3),
        "targets": st.lists(st.sampled_from("qkvo"), min_size=1, unique=True),
        "layers": st.none() | layer_sets,
    },
)
plans = st.fixed_dictionaries(
    {"depth": st.lists(entries, max_size=4)},
    optional={
        "sequence": st.none() | st.lists(pools, max_size=3),
        "bits": st.none() | st.lists(quantised, max_size=3),
        "lora": st.none() | loras,
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
        ({"sequence": "pool"}, "sequence: .*list of entries"),
        ({"sequence": [{"method": "pool"}]}, r"sequence\.0\.layers"),
        ({"sequence": [{"method": "pool", "layers": []}]}, r"sequence\.0\.layers"),
        ({"sequence": [{"method": "pool", "layers": [1], "group": 0}]}, r"group.*got 0"),
        ({"sequence": [{"method": "pool", "layers": [1], "group": 65}]}, r"group.*got 65"),
        ({"sequence": [{"method": "pool", "layers": [1], "group": 4.0}]}, "group"),
        ({"sequence": [{"method": "pool", "layers": [1], "gate_rank": 0}]}, "gate_rank"),
        ({"sequence": [{"method": "pool", "layers": [1], "gate": "row"}]}, r"gate.*got 'row'"),
        ({"sequence": [{"method": "pool", "layers": [1], "position": "mid"}]}, "position"),
        ({"sequence": [{"method": "pool", "layers": [1], "ratio": 4}]}, r"unknown key .*ratio"),
        ({"sequence": [{"method": "latent", "layers": [1], "rank": 4}]}, "sequence"),
        ({"bits": [{"method": "turboquant"}]}, r"bits\.0\.layers"),
        ({"bits": [{"method": "turboquant", "layers": [1], "key_bits": 0}]}, r"key_bits.*got 0"),
        ({"bits": [{"method": "turboquant", "layers": [1], "key_bits": 9}]}, r"key_bits.*got 9"),
        ({"bits": [{"method": "turboquant", "layers": [1], "value_bits": 9}]}, "value_bits"),
        ({"bits": [{"method": "turboquant", "layers": [1], "value_bits": True}]}, "value_bits"),
        ({"bits": [{"method": "turboquant", "layers": [1], "seed": -1}]}, "seed"),
        (
            {"bits": [{"method": "turboquant", "layers": [1], "bits": 4}]},
            r"unknown key .*bits; got 4",
        ),
        ({"bits": [{"method": "pool", "layers": [1]}]}, "bits"),
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


def pool_of(layers, **settings_):
    return {"method": "pool", "layers": layers, **settings_}


def bits_of(layers, **settings_):
    return {"method": "turboquant", "layers": layers, **settings_}


LATENT = {"method": "latent", "layers": [3, 4, 5], "rank": 8}
CSA2 = {"method": "csa2", "source": 3, "readers": [4, 5]}


def test_entries_of_the_other_axes_have_the_documented_defaults():
    plan = Plan.from_dict({"sequence": [pool_of([1])], "bits": [bits_of([2])]})
    (pool,), (bits,) = plan.sequence, plan.bits
    assert (pool.group, pool.gate, pool.overlap) == (4, "token", False)
    assert (pool.mass_bias, pool.position) == (True, "mean")
    assert (bits.key_bits, bits.value_bits, bits.seed) == (8, 4, 0)
    assert plan.folded_layers == (1, 2)
    assert (plan.group_of(1), plan.group_of(2), plan.group_of(3)) == (4, 1, 1)


def test_a_plan_from_before_the_other_axes_is_read():
    old = """
version: 1
anchors: 4
window: 128
prefill_attention: folded
resident: auto
depth:
- {method: latent, layers: [3, 4], rank: 8, value_rank: null, split: null}
sequence: null
bits: null
prefill: full
"""
    plan = Plan.from_yaml(old)
    assert (plan.sequence, plan.bits) == ((), ())
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_a_plan_of_all_axes_survives_yaml():
    text = """
anchors: 0
depth:
- {method: csa2, source: 3, readers: [4, 5]}
sequence:
- {method: pool, layers: [3, 4, 5], group: 2, gate: head, overlap: true, position: last}
- {method: pool, layers: [0]}
bits:
- {method: turboquant, layers: [0], key_bits: 3, value_bits: 2, seed: 11}
"""
    plan = Plan.from_yaml(text)
    again = Plan.from_yaml(plan.to_yaml())
    assert again == plan
    assert [entry.group for entry in again.sequence] == [2, 4]
    assert (again.sequence[0].gate, again.sequence[0].overlap) == ("head", True)
    assert (again.bits[0].key_bits, again.bits[0].seed) == (3, 11)
    assert again.folded_layers == (0, 3, 4, 5)


@pytest.mark.parametrize("depth", [LATENT, CSA2])
@pytest.mark.parametrize("axis", ["sequence", "bits"])
def test_layers_that_share_a_code_share_its_other_axes(described, depth, axis):
    entry = pool_of if axis == "sequence" else bits_of
    whole = [3, 4, 5]
    plan_of(depth, **{axis: [entry(whole)]}).check(described)
    plan_of(depth, **{axis: [entry([0, 1, *whole])]}).check(described)
    with pytest.raises(PlanError, match=rf"share one .* code, so {axis} must name all.*\[4, 5\]"):
        plan_of(depth, **{axis: [entry([4, 5])]}).check(described)
    with pytest.raises(PlanError, match=f"so {axis} must name all of them in one entry"):
        plan_of(depth, **{axis: [entry([3]), entry([4, 5])]}).check(described)


def test_layers_that_keep_their_own_keys_may_differ_on_the_other_axes(described):
    plan_of(
        {"method": "identity", "layers": [0, 1, 2]},
        sequence=[pool_of([0], group=2), pool_of([1])],
        bits=[bits_of([1]), bits_of([2, 3], key_bits=2)],
    ).check(described)


@pytest.mark.parametrize("axis", ["sequence", "bits"])
def test_a_layer_is_in_one_entry_of_an_axis_and_once(described, axis):
    entry = pool_of if axis == "sequence" else bits_of
    with pytest.raises(PlanError, match=f"layer 2 is in two entries of {axis}"):
        plan_of(**{axis: [entry([1, 2]), entry([2, 3])]}).check(described)
    with pytest.raises(PlanError, match="names a layer twice"):
        plan_of(**{axis: [entry([1, 1])]}).check(described)
    with pytest.raises(PlanError, match="layers 0 to 5"):
        plan_of(**{axis: [entry([6])]}).check(described)


@pytest.mark.parametrize("axis", ["sequence", "bits"])
def test_a_dropped_history_is_neither_pooled_nor_quantised(described, axis):
    entry = pool_of if axis == "sequence" else bits_of
    drop = {"method": "drop", "layers": [2, 3]}
    with pytest.raises(PlanError, match=rf"{axis} names layers \[3\], whose history.*drops"):
        plan_of(drop, **{axis: [entry([3, 4])]}).check(described)


@pytest.mark.parametrize("axis", ["sequence", "bits"])
def test_only_full_attention_is_pooled_or_quantised(tiny_config, axis):
    entry = pool_of if axis == "sequence" else bits_of
    hybrid = kvfold.anatomy(tiny_config("qwen3_5"))
    plan_of(**{axis: [entry([3, 7])]}).check(hybrid)
    with pytest.raises(PlanError, match=r"layer 4, which is a linear_attention layer.*\[3, 7\]"):
        plan_of(**{axis: [entry([3, 4])]}).check(hybrid)
    gemma = kvfold.anatomy(tiny_config("gemma3"))
    with pytest.raises(PlanError, match="layer 0, which is a sliding_attention layer"):
        plan_of(**{axis: [entry([0])]}).check(gemma)


@pytest.mark.parametrize("window", [0, 3])
def test_a_group_longer_than_the_window_is_refused(described, window):
    plan_of(sequence=[pool_of([1])], window=4).check(described)
    with pytest.raises(PlanError, match=f"group=4 needs a window.*got window={window}"):
        plan_of(sequence=[pool_of([1])], window=window).check(described)
    drop = {"method": "drop", "layers": [2], "group": 4}
    with pytest.raises(PlanError, match="needs a window of at least"):
        plan_of(drop, window=window).check(described)


def test_the_yardstick_of_a_pooled_plan_lets_tokens_go_as_the_plan_does(described):
    plan = plan_of(
        LATENT, sequence=[pool_of([3, 4, 5]), pool_of([0], group=2)], bits=[bits_of([1])], window=9
    )
    dropped = plan.without_history()
    dropped.check(described)
    assert {entry.group: entry.layers for entry in dropped.depth} == {
        4: (3, 4, 5),
        2: (0,),
        1: (1,),
    }
    assert (dropped.sequence, dropped.bits) == ((), ())
    assert all(dropped.group_of(n) == plan.group_of(n) for n in plan.folded_layers)
