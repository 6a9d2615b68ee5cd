"""Published hybrids, by their configurations alone: what is folded, and what it costs."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

import kvfold
from kvfold.cli import build_app
from kvfold.evaluation.memory import memory_at
from kvfold.methods import build_pipelines, build_state_projector
from kvfold.presets import PRESETS, preset
from kvfold.runtime.ledger import plain_bytes, predict_bytes

from .published import PUBLISHED, published_config, published_text_config

HISTORY = 32_768
NO_SMALLER = {"identity"}
"""Presets that keep every byte, and the window's a second time, ready to leave it."""


@pytest.fixture(params=PUBLISHED)
def name(request):
    return request.param


@pytest.fixture
def shape(name):
    return kvfold.anatomy(published_config(name))


def meta_pipelines(plan, shape):
    with torch.device("meta"):
        return build_pipelines(plan, shape)


@pytest.mark.parametrize(
    ("name", "layers", "heads", "value_heads"),
    [("Qwen3.5-4B", 32, 16, 32), ("Qwen3.6-27B", 64, 24, 48)],
)
def test_the_anatomy_is_the_published_one(name, layers, heads, value_heads):
    shape = kvfold.anatomy(published_config(name))
    assert shape.num_layers == layers
    assert shape.foldable_layers == tuple(range(3, layers, 4))
    assert shape.is_hybrid
    assert shape.rope_is_static
    assert (shape.vocab_size, shape.max_positions) == (248_320, 262_144)
    linear, attention = shape.layers[0], shape.layers[3]
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (heads, 4, 256)
    assert (attention.rotary_dim, attention.k_norm) == (64, "rms_plus_one")
    assert attention.output_gate
    assert linear.state_values == value_heads * 128 * 128
    assert linear.convolution_values == 4 * (2 * 16 * 128 + value_heads * 128)
    assert shape.bytes_per_token() == layers // 4 * 2 * 1024 * 2


def test_the_multimodal_model_has_the_anatomy_of_its_text_half(name, shape):
    assert kvfold.anatomy(published_text_config(name)).layers == shape.layers


def test_the_weights_add_up_to_the_size_in_the_name(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published_text_config(name))
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert billions == pytest.approx({"Qwen3.5-4B": 4.2, "Qwen3.6-27B": 26.9}[name], abs=0.1)


def test_inspect_reads_a_folder_of_the_published_configuration(name, tmp_path):
    """The file is written as published, not by transformers, which would add its defaults."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
    shown = CliRunner().invoke(build_app(), ["inspect", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    layers = f"{PUBLISHED[name]['text_config']['num_hidden_layers']} layers"
    assert layers in " ".join(shown.output.split())  # a long folder's name wraps the line
    assert "does not fit this model" not in shown.output
    as_json = CliRunner().invoke(build_app(), ["inspect", str(tmp_path), "--json"])
    report = json.loads(as_json.output)
    assert set(report["plans"]) == set(PRESETS)
    shape = kvfold.anatomy(published_config(name))
    assert report["recurrent_bytes"] == shape.recurrent_bytes() > 50e6


@pytest.mark.parametrize("plan_name", PRESETS)
def test_every_preset_but_the_identity_makes_a_smaller_cache(plan_name, shape):
    plan = preset(plan_name, shape)
    plain = plain_bytes(shape, HISTORY).total
    (stored,) = memory_at(plan, shape, (HISTORY,))
    resident = predict_bytes(plan, shape, HISTORY).total
    assert math.isfinite(resident) and resident > 0
    if plan_name in NO_SMALLER:
        assert stored.stored_bytes == plain + plan.window * shape.bytes_per_token()
    else:
        assert 1.1 < stored.times_smaller < 20
        shared = predict_bytes(plan.replace(resident="shared"), shape, HISTORY).total
        assert shared < plain


@pytest.mark.parametrize("plan_name", PRESETS)
def test_every_preset_builds_methods_of_the_size_that_it_tells(plan_name, shape):
    plan = preset(plan_name, shape)
    pipelines = meta_pipelines(plan, shape)
    (stored,) = memory_at(plan, shape, (HISTORY,))
    weights = sum(p.numel() for p in pipelines.parameters())
    with torch.device("meta"):
        projector = build_state_projector(plan, shape)
    if projector is not None:
        assert plan_name == "fast-prefill"
        weights += sum(p.numel() for p in projector.parameters())
    assert 2 * weights == stored.addon_bytes
    served = sorted(layer for pipeline in pipelines for layer in pipeline.layers)
    assert tuple(served) == plan.folded_layers


def test_the_cards_parameter_counts_are_those_of_the_4b():
    shape = kvfold.anatomy(published_config("Qwen3.5-4B"))
    (pipeline,) = meta_pipelines(preset("ced-csa2", shape), shape)
    assert sum(p.numel() for p in pipeline.depth.ced.parameters()) == 5_242_880
    for reader in ("23", "27", "31"):
        maps = pipeline.depth.keys[reader], pipeline.depth.values[reader]
        assert sum(p.numel() for made in maps for p in made.parameters()) == 8_388_608


def test_the_cards_idea_fits_sixty_four_layers():
    shape = kvfold.anatomy(published_config("Qwen3.6-27B"))
    plan = preset("ced-csa2", shape)
    ced, csa2 = plan.depth
    assert (ced.split, ced.layers) == (32, (35,))
    assert csa2.readers == (39, 43, 47, 51, 55, 59, 63)
    (pipeline,) = meta_pipelines(plan, shape)
    projector = 2 * (5120 + 1) * 1024
    readers = 7 * 2 * (2048 + 1) * 1024
    assert pipeline.depth.parameter_count() == projector + readers
