"""Bytes at given lengths, stored and resident."""

from __future__ import annotations

import dataclasses

import pytest

from kvfold.anatomy import anatomy
from kvfold.evaluation.memory import Memory, addon_bytes, history_bytes_per_token, memory_at
from kvfold.methods import build_pipelines
from kvfold.plan import Plan
from kvfold.presets import preset

TOKEN = 2 * 2 * 16 * 2  # keys and values of 2 heads of 16 in two bytes


def latent(**settings):
    entry = {"method": "latent", "layers": [3, 4, 5], "rank": 16}
    return Plan.from_dict({"anchors": 4, "window": 8, "depth": [entry], **settings})


def test_no_plan_is_the_plain_cache(tiny_config):
    (memory,) = memory_at(None, anatomy(tiny_config("llama")), (100,))
    assert memory.stored_bytes == memory.resident_bytes == memory.plain_bytes == 100 * 6 * TOKEN
    assert memory.times_smaller == 1.0


def test_stored_bytes_are_codes_window_anchors_and_unfolded_layers(tiny_config):
    (memory,) = memory_at(latent(), anatomy(tiny_config("llama")), (1000,))
    exact, plain = 12 * 3 * TOKEN, 1000 * 3 * TOKEN
    assert memory.stored_bytes == exact + plain + (1000 - 4) * 16 * 2
    assert memory.components["slots"] == (1000 - 12) * 16 * 2
    assert sum(memory.components.values()) == memory.stored_bytes


def test_expanded_readers_save_nothing_in_memory(tiny_config):
    shape = anatomy(tiny_config("llama"))
    (expanded,) = memory_at(latent(resident="expanded"), shape, (2000,))
    (shared,) = memory_at(latent(resident="shared"), shape, (2000,))
    assert expanded.resident_times_smaller < 1.01 < 1.5 < shared.resident_times_smaller
    assert expanded.stored_bytes == shared.stored_bytes


def test_recurrent_state_counts_in_both(tiny_config):
    shape = anatomy(tiny_config("qwen3_5"))
    plan = Plan.from_dict({"depth": [{"method": "latent", "layers": [3, 7], "rank": 8}]})
    (memory,) = memory_at(plan, shape, (10,))
    assert memory.components["recurrent"] == shape.recurrent_bytes()
    assert memory.plain_bytes == shape.recurrent_bytes() + 10 * 2 * TOKEN


def test_history_costs_its_codes_alone(tiny_config):
    shape = anatomy(tiny_config("llama", max_position_embeddings=100_000))
    assert history_bytes_per_token(latent(), shape) == 3 * TOKEN + 16 * 2
    dropped = latent().without_history()
    assert history_bytes_per_token(dropped, shape) == 3 * TOKEN


def test_what_is_stored_does_not_depend_on_the_rotary_embedding(tiny_config):
    shape = anatomy(tiny_config("llama"))
    dynamic = dataclasses.replace(shape, rope_type="dynamic")
    assert memory_at(latent(), dynamic, (500,)) == memory_at(latent(), shape, (500,))


@pytest.mark.parametrize("length", [1, 4, 12, 13])
def test_short_lengths_are_no_error(tiny_config, length):
    (memory,) = memory_at(latent(), anatomy(tiny_config("llama")), (length,))
    assert memory.stored_bytes > 0


def test_bits_a_value_are_those_of_the_attention_cache_alone():
    plain, recurrent = 1_600, 5_000
    components = {"slots": 100, "window": 100, "recurrent": recurrent}
    memory = Memory(10, components, 200 + recurrent, 400 + recurrent, plain + recurrent)
    assert memory.bits_per_value == 2.0
    assert memory.resident_bits_per_value == 4.0
    assert memory.kept_fraction == pytest.approx(5_200 / 6_600) == 1 / memory.times_smaller


def test_the_plain_cache_has_sixteen_bits_a_value(tiny_config, family):
    (memory,) = memory_at(None, anatomy(tiny_config(family)), (300,))
    assert memory.bits_per_value == memory.resident_bits_per_value == 16.0
    assert (memory.kept_fraction, memory.addon_bytes) == (1.0, 0)


def test_bits_a_value_tend_to_those_of_the_code(tiny_config, family):
    """k8v4 on heads of 16: (8 + 4) / 2 bits and a scale of 16 bits for every 16 values."""
    shape = anatomy(tiny_config(family))
    (memory,) = memory_at(preset("k8v4", shape), shape, (2_000_000,))
    assert memory.bits_per_value == pytest.approx(7.0, rel=0.01)


@pytest.mark.parametrize("name", ["pool", "qwen-compress", "k8v8", "k8v4", "k4v4", "k4v2"])
def test_plans_on_the_layers_own_keys_are_as_small_in_memory_as_stored(tiny_config, family, name):
    shape = anatomy(tiny_config(family))
    if name == "qwen-compress" and 3 not in shape.foldable_layers:
        pytest.skip("this shape slides in every fourth layer")
    (memory,) = memory_at(preset(name, shape), shape, (50_000,))
    assert memory.resident_times_smaller == pytest.approx(memory.times_smaller, rel=0.005)


def test_the_weights_of_an_addon_stand_beside_its_cache(tiny_config):
    shape = anatomy(tiny_config("llama"))
    (memory,) = memory_at(latent(), shape, (1000,))
    values = sum(p.numel() for p in build_pipelines(latent(), shape).parameters())
    assert memory.addon_bytes == addon_bytes(latent(), shape) == 2 * values > 0
    assert sum(memory.components.values()) == memory.stored_bytes
    assert memory_at(preset("k8v4", shape), shape, (1000,))[0].addon_bytes == 0


def test_maps_that_two_entries_share_are_counted_once(tiny_config):
    shape = anatomy(tiny_config("llama"))
    ced = {"method": "ced", "split": 1, "layers": [2, 4]}
    readers = [{"method": "csa2", "source": n, "readers": [n + 1]} for n in (2, 4)]
    plan = Plan.from_dict({"depth": [ced, *readers]})
    hidden, width = shape.hidden_size, shape.layers[2].kv_width
    projectors, maps = 2 * 2 * (hidden + 1) * width, 2 * 2 * (2 * width + 1) * width
    assert addon_bytes(plan, shape) == 2 * (projectors + maps)


def test_a_pooled_prompt_of_301_tokens_keeps_the_cards_entries(tiny_config):
    """43 slots, 1 token of an unfinished group and a window of 128, of 301 tokens."""
    shape = anatomy(tiny_config("qwen3_5"))
    (memory,) = memory_at(preset("qwen-compress", shape), shape, (301,))
    layers = len(shape.foldable_layers)
    assert memory.components["slots"] == layers * 43 * TOKEN
    assert memory.components["window"] == layers * 131 * TOKEN  # room for the most there can be
    assert memory.components["anchors"] == 0


def test_a_state_projector_is_part_of_an_addons_weights(tiny_config):
    shape = anatomy(tiny_config("qwen3_5"))
    plan = Plan.from_dict({"depth": [{"method": "ced", "split": 4, "layers": [7]}]})
    layers, hidden = 3, shape.hidden_size
    more = addon_bytes(plan.replace(state_projector=True), shape) - addon_bytes(plan, shape)
    assert more == 2 * layers * hidden * (hidden + 1)


def test_low_rank_terms_are_part_of_an_addons_weights(tiny_config):
    shape = anatomy(tiny_config("llama"))
    plan = Plan.from_dict({"depth": [{"method": "identity", "layers": [2, 4]}]})
    assert addon_bytes(plan, shape) == 0
    layers, heads_width = 2, 4 * 16
    a_layer = 3 * (shape.hidden_size + heads_width)  # q; o has the same two widths
    assert addon_bytes(plan.replace(lora={"rank": 3}), shape) == 2 * layers * 2 * a_layer
