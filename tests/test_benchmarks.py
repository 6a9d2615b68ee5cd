"""The benchmark's plans are possible, and its targets belong to rows that it measures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from kvfold.anatomy import anatomy
from kvfold.errors import KvfoldError

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


def test_rows_that_are_measured_already_are_kept_and_others_put_in_order(depth_table, tmp_path):
    path, settings = tmp_path / "depth.json", {"model": "m", "windows": 8}
    table = depth_table.Table(path, settings)
    table.base = {"perplexity": 27.6}
    table.add({"name": "b"}, ["a", "b"])
    table.add({"name": "a"}, ["a", "b"])
    again = depth_table.Table(path, settings)
    assert list(again.rows) == ["a", "b"]
    assert again.base == {"perplexity": 27.6}
    assert json.loads(path.read_text())["settings"] == settings


def test_rows_of_another_measurement_are_not_mixed_in(depth_table, tmp_path):
    table = depth_table.Table(tmp_path / "depth.json", {"windows": 8})
    table.save()
    with pytest.raises(KvfoldError, match="name another --out"):
        depth_table.Table(tmp_path / "depth.json", {"windows": 2})
