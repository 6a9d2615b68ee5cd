"""The benchmark's plans are possible, and its targets belong to rows that it measures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kvfold.anatomy import anatomy

FOLDER = Path(__file__).parents[1] / "benchmarks"


def _loaded(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def depth_table():
    yield _loaded("depth_table")
    del sys.modules["depth_table"]


@pytest.fixture(scope="module")
def axes_table():
    yield _loaded("axes_table")
    del sys.modules["axes_table"]


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


def test_every_axis_alone_each_pair_and_all_three_are_measured(axes_table, shape):
    plans = axes_table.fits(shape)
    for plan in plans.values():
        plan.check(shape)
    used = {
        name: tuple(axis for axis in ("depth", "sequence", "bits") if getattr(plan, axis))
        for name, plan in plans.items()
    }
    for names in ("depth", "sequence", "bits"):
        assert used[names] == (names,)
    assert used["depth + sequence"] == ("depth", "sequence")
    assert used["depth + bits"] == ("depth", "bits")
    assert used["sequence + bits"] == ("sequence", "bits")
    assert used["depth + sequence + bits"] == ("depth", "sequence", "bits")


def test_every_row_of_the_axes_has_its_plan_and_a_name_of_its_own(axes_table, shape):
    plans = axes_table.fits(shape)
    rows = list(axes_table.rows(plans))
    assert len({row.name for row in rows}) == len(rows)
    assert {axes_table.plan_name(row) for row in rows} == set(plans)


def test_the_tables_show_every_row_and_speed(axes_table, tmp_path):
    table = axes_table.Rows(
        tmp_path / "axes.json",
        dict.fromkeys(("model", "windows", "long_windows", "fit_tokens", "gate_steps"), 8),
    )
    base = {"perplexity": 20.0}
    table.shared.update(
        base={"1024": base, "4096": base},
        speed={"bits": {"prefill_of_plain": 0.5, "decode_of_plain": 0.75}},
    )
    for kind in ("axes", "pooling", "card", "bits"):
        table.add(
            {
                "name": kind,
                "table": kind,
                "fit": "bits",
                "window": 128,
                "tokens_in_a_row": 1024,
                "perplexity": 21.0,
                "perplexity_rise": 0.05,
                "kl": 0.1,
                "top_1_agreement": 0.9,
                "top_5_agreement": 0.8,
                "recovery": None,
                "dropped_perplexity": 30.0,
                "times_smaller": {"1024": 1.5, "4096": 2.0, "16384": 2.5},
                "resident": {"shared": 30},
                "resident_times_smaller": {"16384": 2.2},
            },
            [],
        )
    text = axes_table.markdown(table)
    quality = "21.00 | 0.1000 | 90.0% | 80.0% | -"
    assert f"| bits | shared | {quality} | 1.5x | 2.0x | 2.5x | 2.2x | 0.50 | 0.75 |" in text
    assert text.count(f"| bits | 128 | {quality} | 5.00% | 2.5x |") == 3
    assert text.count("| dropped | 128 | 30.00") == 3
