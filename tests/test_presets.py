"""Presets: they fit every family, and are the card's where the model has its shape."""

from __future__ import annotations

import pytest

import kvfold
from kvfold.budget import history_bytes, plain_history_bytes
from kvfold.errors import PlanError
from kvfold.methods import build_pipelines
from kvfold.plan import Turboquant
from kvfold.presets import PRESETS, RANK_MULTIPLE, preset
from kvfold.runtime.schedule import Schedule


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
    missing = {"csa2", "ced-csa2"} if described.is_hybrid else set()  # two layers of the upper half
    if 3 not in described.foldable_layers:
        missing |= {"qwen-compress"}
    for name in PRESETS.keys() - missing:
        plan = preset(name, described)
        plan.check(described)
        assert plan.folded_layers


def test_a_preset_that_needs_more_layers_than_there_are_says_how_many(tiny_config):
    described = kvfold.anatomy(tiny_config("qwen3_5"))  # one attention layer in the upper half
    for name in ("csa2", "ced-csa2"):
        with pytest.raises(PlanError, match=r"at least 2 full-attention layers .* has 1: \[7\]"):
            preset(name, described)


def test_fast_prefill_skips_what_each_kind_of_model_can_spare(
    card_shape, smollm2_shape, tiny_config
):
    hybrid, dense = preset("fast-prefill", card_shape), preset("fast-prefill", smollm2_shape)
    assert (hybrid.prefill, hybrid.split, hybrid.folded_layers) == ("skip", 19, (19, 23, 27, 31))
    assert (dense.prefill, dense.split, dense.folded_layers) == ("skip", 22, tuple(range(22, 30)))
    assert (hybrid.state_projector, dense.state_projector) == (True, False)
    assert hybrid.window == hybrid.replay == 256
    kinds = ["full_attention"] * 5 + ["sliding_attention"]
    with pytest.raises(PlanError, match="sliding window"):
        preset("fast-prefill", kvfold.anatomy(tiny_config("gemma3", layer_types=kinds)))


def test_an_unknown_preset_lists_the_known_ones(smollm2_shape):
    with pytest.raises(PlanError) as refusal:
        preset("best", smollm2_shape)
    assert "got 'best'" in str(refusal.value)
    assert all(f"{name}, " in f"{refusal.value}, ".replace(";", ",") for name in PRESETS)


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
    (pipeline,) = build_pipelines(preset("ced-csa2", card_shape), card_shape)
    method = pipeline.depth
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


@pytest.mark.parametrize("times", [4, 8, 16])
def test_so_many_times_smaller_is_at_least_so_many_on_every_family(tiny_config, family, times):
    described = kvfold.anatomy(tiny_config(family))
    plan = preset(f"{times}x", described)
    assert plan.folded_layers == described.foldable_layers
    assert history_bytes(plan, described) * times <= plain_history_bytes(described)


@pytest.mark.parametrize("times", [4, 8, 16])
def test_hardly_more_is_given_up_than_was_asked_for(smollm2_shape, card_shape, times):
    for described in (smollm2_shape, card_shape):
        made = plain_history_bytes(described) / history_bytes(
            preset(f"{times}x", described), described
        )
        assert times <= made < 1.03 * times


def test_whole_model_presets_compose_depth_and_bits_as_the_table_says(smollm2_shape, card_shape):
    dense = {times: preset(times, smollm2_shape) for times in ("4x", "8x", "16x")}
    for plan in dense.values():
        assert [len(entry.layers) for entry in plan.depth] == [5] * 6
    assert [dense[times].bits[0].key_bits for times in dense] == [8, 5, 5]
    assert {plan.resident for plan in dense.values()} == {"shared"}
    hybrid = {times: preset(times, card_shape) for times in ("4x", "8x", "16x")}
    for plan in hybrid.values():
        assert [len(entry.layers) for entry in plan.depth] == [4, 4]
    assert [hybrid[times].bits[0].key_bits for times in hybrid] == [8, 5, 5]


@pytest.mark.parametrize(
    ("name", "bits"), [("k8v8", (8, 8)), ("k8v4", (8, 4)), ("k4v4", (4, 4)), ("k4v2", (4, 2))]
)
def test_bits_presets_quantise_every_attention_layer_and_nothing_else(card_shape, name, bits):
    plan = preset(name, card_shape)
    (entry,) = plan.bits
    assert (entry.key_bits, entry.value_bits) == bits
    assert entry.layers == card_shape.foldable_layers
    assert (plan.depth, plan.sequence) == ((), ())
    assert sum(p.parameter_count() for p in build_pipelines(plan, card_shape)) == 0


def test_k8v4_has_the_default_bits(smollm2_shape):
    (entry,) = preset("k8v4", smollm2_shape).bits
    assert entry == Turboquant(layers=entry.layers)


def test_k8v4_stores_six_bits_a_value_on_the_cards_heads(card_shape):
    bits = 16 * history_bytes(preset("k8v4", card_shape), card_shape)
    assert bits / plain_history_bytes(card_shape) == pytest.approx(6.0625)


def test_pool_takes_four_tokens_a_slot_in_every_attention_layer(smollm2_shape):
    plan = preset("pool", smollm2_shape)
    (entry,) = plan.sequence
    assert (entry.group, entry.gate, entry.mass_bias) == (4, "channel", True)
    assert entry.layers == smollm2_shape.foldable_layers
    assert (plan.depth, plan.bits) == ((), ())


def test_qwen_compress_is_the_second_card(card_shape):
    plan = preset("qwen-compress", card_shape)
    (entry,) = plan.sequence
    assert entry.layers == (3, 7, 11, 15, 19, 23, 27, 31) == card_shape.foldable_layers
    assert (entry.gate, entry.group, entry.overlap, entry.mass_bias) == ("token", 4, False, False)
    assert entry.position == "mean"
    assert (plan.anchors, plan.window, plan.prefill_attention) == (0, 128, "folded")
    assert (plan.depth, plan.bits) == ((), ())


def test_qwen_compress_keeps_the_cards_entries_of_a_301_token_prompt(card_shape):
    plan = preset("qwen-compress", card_shape)
    schedule = Schedule(plan.anchors, plan.window, plan.group_of(3))
    slots = schedule.slots(301)
    raw = 301 - schedule.folded_until(301)
    assert (slots, raw, slots + raw) == (43, 129, 172)


def test_qwen_compress_has_the_cards_gate(card_shape):
    """One Linear(hidden, 1) without bias and four position biases a layer: about hidden values."""
    for pipeline in build_pipelines(preset("qwen-compress", card_shape), card_shape):
        assert pipeline.parameter_count() == card_shape.hidden_size + 4


def test_qwen_compress_takes_every_fourth_layer_of_a_dense_model(smollm2_shape):
    plan = preset("qwen-compress", smollm2_shape)
    assert plan.folded_layers == tuple(range(3, 30, 4))


def test_qwen_compress_refuses_a_model_without_attention_at_its_places(tiny_config):
    described = kvfold.anatomy(tiny_config("gemma3"))  # layers 0 and 3 of 6 slide
    with pytest.raises(PlanError, match=r"at least 1 .* layers 3, 7, .*\(i % 4 == 3\); it has 0"):
        preset("qwen-compress", described)
