"""Bytes at given lengths, stored and resident."""

from __future__ import annotations

import dataclasses

import pytest

from kvfold.anatomy import anatomy
from kvfold.evaluation.memory import history_bytes_per_token, memory_at
from kvfold.plan import Plan

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
