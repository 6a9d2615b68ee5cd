"""Plans in words."""

from __future__ import annotations

import pytest

import kvfold
from kvfold.describe import describe
from kvfold.errors import PlanError
from kvfold.plan import Plan
from kvfold.presets import PRESETS, preset


@pytest.fixture(scope="module")
def shape():
    from transformers import LlamaConfig

    return kvfold.anatomy(
        LlamaConfig(
            hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
        )
    )


ALL = list(range(30))


def words(shape, **axes):
    return describe(Plan.from_dict(axes), shape)


def test_a_composed_plan_is_told_axis_by_axis(shape):
    groups = [ALL[start : start + 5] for start in range(0, 30, 5)]
    told = words(
        shape,
        depth=[{"method": "latent", "layers": group, "rank": 240} for group in groups],
        sequence=[{"method": "pool", "layers": ALL, "group": 4, "gate": "head"}],
        bits=[{"method": "turboquant", "layers": ALL, "key_bits": 8}],
    )
    assert told == (
        "latent, 6 groups of 5 layers, rank 240 (8.0x), 4 tokens a slot (head gate), codes in 8 "
        "bits: 363 bytes a token, 63.5x smaller"
    )


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({}, "30 layers left as they are: 23,040 bytes a token, 1.0x smaller"),
        (
            {"bits": [{"method": "turboquant", "layers": ALL}]},
            "keys in 8 bits, values in 4: 9,000 bytes a token, 2.6x smaller",
        ),
        (
            {"bits": [{"method": "turboquant", "layers": [0], "key_bits": 1, "value_bits": 1}]},
            (
                "keys and values in 1 bit in 1 of 30 layers, 29 layers left as they are: "
                "22,332 bytes a token, 1.0x smaller"
            ),
        ),
        (
            {"sequence": [{"method": "pool", "layers": ALL[1:], "gate": "mean", "overlap": True}]},
            (
                "4 tokens a slot (plain mean, overlapping) in 29 of 30 layers, 1 layer left as it "
                "is: 6,336 bytes a token, 3.6x smaller"
            ),
        ),
        (
            {
                "depth": [
                    {"method": "latent", "layers": [0, 1], "rank": 96, "value_rank": 96},
                    {"method": "latent", "layers": [2, 3, 4], "rank": 96},
                ],
                "bits": [{"method": "turboquant", "layers": [0, 1, 2, 3, 4]}],
            },
            (
                "latent, 1 group of 2 and 1 group of 3 layers, ranks 96 to 192 (6.7x), keys in 8 "
                "bits, values in 4 in 5 of 30 layers, 25 layers left as they are: 19,446 bytes a "
                "token, 1.2x smaller"
            ),
        ),
        (
            {"depth": [{"method": "latent", "layers": ALL[15:], "rank": 576, "split": 15}]},
            (
                "latent from H_15, 1 group of 15 layers, rank 576 (10.0x), 15 layers left as they "
                "are: 12,672 bytes a token, 1.8x smaller"
            ),
        ),
        (
            {"depth": [{"method": "drop", "layers": ALL}]},
            "history of 30 layers dropped: 0 bytes a token",
        ),
        (
            {"depth": [{"method": "identity", "layers": ALL}]},
            "own keys and values of 30 layers: 23,040 bytes a token, 1.0x smaller",
        ),
    ],
)
def test_every_method_has_its_words(shape, axes, told):
    assert words(shape, **axes) == told


def test_every_preset_is_told_in_one_line(shape):
    for name in PRESETS:
        told = describe(preset(name, shape), shape)
        assert "\n" not in told
        assert "bytes a token" in told
        assert not told.startswith((",", ":"))
    assert describe(preset("ced-csa2", shape), shape).startswith(
        "ced, 1 layer from H_15, csa2 (joint), 1 group of 15 layers, "
    )


def test_a_plan_for_another_model_is_refused(shape):
    with pytest.raises(PlanError, match="layers 0 to 29"):
        words(shape, depth=[{"method": "drop", "layers": [99]}])


CED = {"depth": [{"method": "ced", "split": 15, "layers": ALL[15:]}], "prefill": "skip"}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, "prompts skip layers 15-29 but for the last 256 tokens (56% of the work at 2,048)"),
        (
            {"window": 1, "replay": 1},
            "prompts skip layers 15-29 but for the last token (50% of the work at 2,048)",
        ),
        (
            {"depth": [{"method": "ced", "split": 29, "layers": [29]}], "replay": 1024},
            "prompts skip layer 29 but for the last 1,024 tokens (98% of the work at 2,048)",
        ),
    ],
)
def test_what_a_prompt_skips_is_told(shape, keys, told):
    assert f", {told}: " in words(shape, **{**CED, **keys})


def test_nothing_is_told_of_skipping_where_prompts_run_in_full(shape):
    assert "skip" not in words(shape, **{**CED, "prefill": "full"})


def test_projected_states_are_told(tiny_config):
    hybrid = kvfold.anatomy(tiny_config("qwen3_5"))
    plan = {"depth": [{"method": "ced", "split": 4, "layers": [7]}], "prefill": "skip"}
    told = "prompts skip layers 4-7 but for the last 256 tokens (56% of the work at 2,048)"
    assert f", {told}: " in words(hybrid, **plan)
    assert f", {told}, states projected: " in words(hybrid, **plan, state_projector=True)


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"rank": 8}, "lora of rank 8 on q and o of 1 layer: "),
        (
            {"rank": 2, "targets": ["q", "k", "v"], "layers": [3, 4]},
            "lora of rank 2 on q, k and v of 2 layers: ",
        ),
    ],
)
def test_low_rank_terms_are_told(shape, lora, told):
    pool = {"method": "pool", "layers": [3]}
    assert told in words(shape, sequence=[pool], lora=lora)
    assert "lora" not in words(shape, sequence=[pool])
