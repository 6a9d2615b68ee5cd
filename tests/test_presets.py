"""Presets: they fit every family, and are the card's where the model has its shape."""

from __future__ import annotations

import pytest

import kvfold
from kvfold.errors import PlanError
from kvfold.methods import build_methods
from kvfold.presets import PRESETS, RANK_MULTIPLE, preset


@pytest.fixture(scope="module")
def card_shape():
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


@pytest.fixture(scope="module")
def smollm2_shape():
    from transformers import LlamaConfig

    return kvfold.anatomy(
        LlamaConfig(
            hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
        )
    )


def test_every_preset_fits_every_family(tiny_config, family):
    described = kvfold.anatomy(tiny_config(family))
    needs_two_upper_layers = {"csa2", "ced-csa2"} if described.is_hybrid else set()
    for name in PRESETS.keys() - needs_two_upper_layers:
        plan = preset(name, described)
        plan.check(described)
        assert plan.folded_layers


def test_a_preset_that_needs_more_layers_than_there_are_says_how_many(tiny_config):
    described = kvfold.anatomy(tiny_config("qwen3_5"))  # one attention layer in the upper half
    for name in ("csa2", "ced-csa2"):
        with pytest.raises(PlanError, match=r"at least 2 full-attention layers .* has 1: \[7\]"):
            preset(name, described)


def test_an_unknown_preset_lists_the_known_ones(smollm2_shape):
    with pytest.raises(PlanError, match="balanced, latent, ced, csa2, ced-csa2, identity"):
        preset("best", smollm2_shape)


def test_a_model_without_full_attention_has_no_presets(tiny_config):
    windowed = kvfold.anatomy(tiny_config("mistral", sliding_window=8))
    for name in PRESETS:
        with pytest.raises(PlanError, match="at least"):
            preset(name, windowed)


def test_the_cards_settings_are_used_on_the_cards_shape(card_shape):
    plan = preset("ced-csa2", card_shape)
    ced, csa2 = plan.depth
    assert (ced.split, ced.layers, ced.bias, ced.normalize) == (16, (19,), False, False)
    assert (csa2.source, csa2.readers, csa2.form) == (19, (23, 27, 31), "separate")
    assert (csa2.residual_hidden, csa2.bias) == (1536, False)
    assert (plan.anchors, plan.window) == (0, 0)


def test_the_cards_parameter_counts_are_reproduced(card_shape):
    (method,) = build_methods(preset("ced-csa2", card_shape), card_shape)
    projector = sum(p.numel() for p in method.ced.parameters())
    assert projector == 5_242_880
    for reader in ("23", "27", "31"):
        maps = method.keys[reader], method.values[reader]
        assert sum(p.numel() for map_ in maps for p in map_.parameters()) == 8_388_608
    assert method.parameter_count() == 5_242_880 + 3 * 8_388_608


def test_other_shapes_get_the_cards_idea(smollm2_shape):
    ced, csa2 = preset("ced-csa2", smollm2_shape).depth
    assert (ced.split, ced.layers) == (15, (15,))
    assert csa2.readers == tuple(range(16, 30))
    assert csa2.form == "joint"


def test_ced_serves_every_upper_layer(smollm2_shape, card_shape):
    for described, split in ((smollm2_shape, 15), (card_shape, 16)):
        (entry,) = preset("ced", described).depth
        upper = tuple(layer for layer in described.foldable_layers if layer >= split)
        assert (entry.split, entry.layers) == (split, upper)


def test_csa2_groups_the_upper_layers(smollm2_shape, card_shape):
    groups = [entry.layers for entry in preset("csa2", smollm2_shape).depth]
    assert groups == [tuple(range(start, start + 5)) for start in (15, 20, 25)]
    assert [entry.layers for entry in preset("csa2", card_shape).depth] == [(19, 23, 27, 31)]


def test_latent_ranks_follow_the_stacked_width(smollm2_shape, card_shape):
    (entry,) = preset("latent", smollm2_shape).depth
    assert entry.rank == 576
    (entry,) = preset("latent", card_shape).depth
    assert entry.rank == 816
    assert abs(entry.rank - 4 * 2048 / 10) < RANK_MULTIPLE


def test_balanced_covers_every_foldable_layer(smollm2_shape, card_shape):
    for described in (smollm2_shape, card_shape):
        assert preset("balanced", described).folded_layers == described.foldable_layers


def test_a_layer_left_over_joins_the_group_before_it(tiny_config):
    described = kvfold.anatomy(tiny_config("llama"))  # 6 layers, groups of 5
    assert [entry.layers for entry in preset("balanced", described).depth] == [(0, 1, 2, 3, 4, 5)]
