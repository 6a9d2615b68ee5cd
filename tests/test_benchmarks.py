"""The benchmark's plans are possible, and its targets belong to rows that it measures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kvfold.anatomy import anatomy

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "depth_table.py"


@pytest.fixture(scope="module")
def depth_table():
    spec = importlib.util.spec_from_file_location("depth_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["depth_table"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["depth_table"]


@pytest.fixture(scope="module")
def shape(tiny_config):
    """The shape of SmolLM2-135M."""
    return anatomy(
        tiny_config(
            "llama",
            num_hidden_layers=30,
            hidden_size=576,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
        )
    )


def test_every_plan_fits_the_model(depth_table, shape):
    for plan in depth_table.fits(shape).values():
        plan.check(shape)


def test_every_target_is_a_row_that_is_measured(depth_table, shape):
    names = [row.name for row in depth_table.rows(depth_table.fits(shape))]
    assert len(names) == len(set(names))
    assert set(depth_table.TARGETS) <= set(names)


def test_codes_of_all_layers_at_once_and_of_every_group_size_are_in_it(depth_table, shape):
    names = set(depth_table.fits(shape))
    smallest = depth_table.TIMES_SMALLER[-1]
    assert {f"all latent groups of {size}, {smallest}x" for size in (2, 3, 5, 10, 30)} <= names
