"""The three axes together, on plain tensors."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.methods import (
    Bits,
    CodePart,
    Source,
    build_pipelines,
    depth_methods,
    rebuilt_pipelines,
)
from kvfold.methods.maps import rms_normalize
from kvfold.plan import Plan

LATENT = {"method": "latent", "layers": [3, 4, 5], "rank": 10}
CSA2 = {"method": "csa2", "source": 3, "readers": [4, 5]}
CED = {"method": "ced", "split": 3, "layers": [3, 4, 5]}
DEPTHS = {"own": [], "latent": [LATENT], "csa2": [CSA2], "ced": [CED]}
UPPER = [3, 4, 5]


@pytest.fixture(scope="module")
def described(tiny_config):
    return kvfold.anatomy(tiny_config("llama"))


def built(described, depth="own", pool=None, bits=None, layers=UPPER):
    plan = Plan.from_dict(
        {
            "depth": DEPTHS[depth],
            "sequence": [] if pool is None else [{"method": "pool", "layers": layers, **pool}],
            "bits": [] if bits is None else [{"method": "turboquant", "layers": layers, **bits}],
        }
    )
    made = build_pipelines(plan, described).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = (
            torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            / max(1, parameter.shape[-1]) ** 0.5
        )
    return made


def activations(pipeline, tokens=8):
    generator = torch.Generator().manual_seed(1)
    return {
        source: torch.randn(2, tokens, 32, generator=generator, dtype=torch.float64)
        for source in pipeline.inputs
    }


def by_hand(pipeline, codes, scores):
    """Token-gated slots without overlap, one at a time: (batch, tokens // r, code_width)."""
    group, slots = pipeline.group, []
    for start in range(0, codes.shape[1], group):
        own = slice(start, start + group)
        weights = (scores[:, own] + pipeline.sequence.ape).softmax(dim=1)
        slots.append((weights * codes[:, own]).sum(dim=1))
    return torch.stack(slots, dim=1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_record_is_a_tokens_code_with_its_scores_behind(described, depth):
    for pipeline in built(described, depth, {"gate": "head"}):
        given = activations(pipeline)
        records = pipeline.records(given)
        assert records.shape == (2, 8, pipeline.record_width)
        width = pipeline.depth.code_width
        assert torch.equal(records[..., :width], pipeline.depth.encode(given))
        hidden = given[pipeline.depth.gate_source]
        if depth == "ced":
            hidden = rms_normalize(hidden)
        torch.testing.assert_close(records[..., width:], pipeline.sequence.scores(hidden))
        heads = sum(part.heads for part in pipeline.depth.code_parts)
        assert pipeline.record_width == width + heads


@pytest.mark.parametrize("depth", DEPTHS)
def test_inputs_are_the_depths_and_the_gates_each_once(described, depth):
    (pipeline, *_) = built(described, depth, {})
    own = set(pipeline.depth.inputs)
    assert set(pipeline.inputs) == own | {pipeline.depth.gate_source}
    assert len(set(pipeline.inputs)) == len(pipeline.inputs)
    (without, *_) = built(described, depth, {"gate": "mean"})
    assert without.inputs == without.depth.inputs
    assert without.record_width == without.depth.code_width


def test_a_gate_scores_what_its_layers_attention_reads(described):
    own = [p.depth.gate_source for p in built(described, "own", {})]
    assert own == [Source("inputs", layer) for layer in UPPER]
    assert [p.depth.gate_source for p in built(described, "latent", {})] == [Source("inputs", 5)]
    assert [p.depth.gate_source for p in built(described, "csa2", {})] == [Source("inputs", 3)]
    assert [p.depth.gate_source for p in built(described, "ced", {})] == [Source("hidden", 3)]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_slots_are_the_weighted_averages_of_whole_groups(described, depth, group):
    (pipeline, *_) = built(described, depth, {"group": group})
    records = pipeline.records(activations(pipeline)).detach()
    codes, scores = records.split([pipeline.depth.code_width, 1], dim=-1)
    slots = pipeline.slots(records)
    assert slots.shape == (2, 8 // group, pipeline.depth.code_width)
    torch.testing.assert_close(slots, by_hand(pipeline, codes, scores))


def test_with_overlap_the_group_before_leads(described):
    (pipeline, *_) = built(described, "own", {"group": 2, "overlap": True})
    records = pipeline.records(activations(pipeline)).detach()
    whole = pipeline.slots(records)
    assert whole.shape[1] == 3
    for slot in range(3):
        alone = pipeline.slots(records[:, 2 * slot : 2 * slot + 4])
        torch.testing.assert_close(alone[:, 0], whole[:, slot])
    first = pipeline.slots(records, torch.tensor([[False, True, True]]))
    torch.testing.assert_close(first[:, 1:], whole[:, 1:])
    noise = records.clone()
    noise[:, :2] = 1e3
    again = pipeline.slots(noise, torch.tensor([[False, True, True]]))
    torch.testing.assert_close(again[:, 0], first[:, 0])


def test_without_a_sequence_axis_records_are_codes_and_codes_are_slots(described):
    (pipeline,) = built(described, "latent")
    given = activations(pipeline)
    records = pipeline.records(given)
    assert torch.equal(records, pipeline.depth.encode(given))
    assert pipeline.slots(records) is records
    assert pipeline.slot_bias(3) is None
    assert not pipeline.overlap
    assert pipeline.group == 1


@pytest.mark.parametrize("depth", ["latent", "csa2", "ced"])
def test_a_pooled_code_gives_every_layer_the_average_of_its_own_keys_and_values(described, depth):
    """Linear maps commute with averages whose weights sum to 1, biases included."""
    (pipeline,) = built(described, depth, {})
    records = pipeline.records(activations(pipeline)).detach()
    codes, scores = records.split([pipeline.depth.code_width, 1], dim=-1)
    for layer in UPPER:
        of_slots = pipeline.depth.decode(layer, pipeline.slots(records))
        of_tokens = pipeline.depth.decode(layer, codes)
        for pooled, each in zip(of_slots, of_tokens, strict=True):
            torch.testing.assert_close(pooled, by_hand(pipeline, each, scores))


@pytest.mark.parametrize(("position", "place"), [("first", 0.0), ("mean", 1.5), ("last", 3.0)])
def test_a_slots_place_among_its_tokens_is_the_plans(described, position, place):
    (pipeline, *_) = built(described, "own", {"position": position})
    assert pipeline.slot_position == place
    assert pipeline.group == 4


def test_bits_of_keys_values_and_codes_of_both():
    bits = Bits(8, 2, 5)
    assert bits.of(CodePart("keys", 2, 4)) == 8
    assert bits.of(CodePart("values", 2, 4)) == 2
    assert bits.of(CodePart("both", 1, 9)) == 8


def test_layers_that_only_another_axis_names_keep_their_own_keys_and_values(described):
    plan = Plan.from_dict(
        {
            "depth": [LATENT],
            "sequence": [{"method": "pool", "layers": [1], "group": 2}],
            "bits": [{"method": "turboquant", "layers": [0, 1], "key_bits": 3, "seed": 9}],
        }
    )
    made = list(build_pipelines(plan, described))
    assert [p.layers for p in made] == [(3, 4, 5), (0,), (1,)]
    assert [m.name for m in depth_methods(made)] == ["latent", "identity", "identity"]
    assert [p.group for p in made] == [1, 1, 2]
    assert [p.bits for p in made] == [None, Bits(3, 4, 9), Bits(3, 4, 9)]
    assert [p.sequence is None for p in made] == [True, True, False]
    assert [p.holds_all for p in made] == [False, True, True]


def test_a_code_that_holds_only_its_source_does_not_hold_all(described):
    (pipeline,) = built(described, "csa2")
    assert pipeline.depth.holds(3)
    assert not pipeline.holds_all


def test_other_bits_are_built_around_the_same_fitted_weights(described):
    fitted = built(described, "csa2", {"gate": "head"}, {"key_bits": 8})
    plan = Plan.from_dict(
        {
            "depth": [CSA2],
            "sequence": [{"method": "pool", "layers": UPPER, "gate": "head"}],
            "bits": [{"method": "turboquant", "layers": [0, *UPPER], "key_bits": 2}],
        }
    )
    first, second = rebuilt_pipelines(plan, described, fitted)
    assert first.depth is fitted[0].depth
    assert first.sequence is fitted[0].sequence
    assert first.bits == second.bits == Bits(2, 4, 0)
    assert second.layers == (0,)
    assert not list(second.parameters())


def test_trained_values_are_counted_over_all_axes(described):
    (pipeline,) = built(described, "latent", {"gate": "token"})
    gate = 32 + 4 + 3 * described.layers[3].heads
    assert pipeline.parameter_count() == pipeline.depth.parameter_count() + gate
