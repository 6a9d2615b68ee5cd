"""From a plan to its methods, and what holds of every method."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.errors import PlanError
from kvfold.methods import IdentityFold, Source, build_pipelines, depth_methods
from kvfold.plan import Plan

CED = {"method": "ced", "split": 3, "layers": [3]}
CSA2 = {"method": "csa2", "source": 3, "readers": [4, 5]}
DEPTHS = {
    "identity": [{"method": "identity", "layers": [2, 3]}],
    "drop": [{"method": "drop", "layers": [2, 3]}],
    "ced": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}],
    "csa2": [CSA2],
    "ced feeding csa2": [CED, CSA2],
    "latent": [{"method": "latent", "layers": [2, 3], "rank": 16}],
    "two entries": [CSA2, {"method": "latent", "layers": [0, 1], "rank": 16}],
}


@pytest.fixture(scope="module")
def described(tiny_config):
    return kvfold.anatomy(tiny_config("llama"))


def built(name, described):
    plan = Plan.from_dict({"depth": DEPTHS[name]})
    return plan, list(depth_methods(build_pipelines(plan, described)))


@pytest.mark.parametrize("name", DEPTHS)
def test_methods_serve_exactly_the_layers_of_the_plan(name, described):
    plan, methods = built(name, described)
    served = [layer for method in methods for layer in method.layers]
    assert sorted(served) == list(plan.folded_layers)


@pytest.mark.parametrize("name", [name for name in DEPTHS if name != "drop"])
def test_every_code_has_its_width_and_gives_every_layer_its_own(name, described):
    _, methods = built(name, described)
    for method in methods:
        given = {
            source: torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
            for source in method.inputs
        }
        code = method.encode(given)
        assert code.shape == (1, 3, method.code_width)
        for layer in method.layers:
            keys, values = method.decode(layer, code)
            assert keys.shape == values.shape == (1, 3, described.layers[layer].kv_width)


def test_identity_gives_back_what_it_was_given():
    fold = IdentityFold(2, 2, 4)
    given = {
        source: torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(layer))
        for layer, source in enumerate(fold.inputs)
    }
    keys, values = fold.decode(2, fold.encode(given))
    assert torch.equal(keys, given[Source("keys", 2)])
    assert torch.equal(values, given[Source("values", 2)])
    assert fold.holds(2)
    assert fold.parameter_count() == 0


def test_ced_that_feeds_csa2_becomes_one_method(described):
    _, methods = built("ced feeding csa2", described)
    assert [method.name for method in methods] == ["csa2"]
    assert methods[0].inputs == (Source("hidden", 3),)


def test_keys_of_models_with_a_k_norm_are_normalised_before_encoding(tiny_config):
    plan = Plan.from_dict({"depth": DEPTHS["latent"]})
    for family, expected in (("llama", False), ("qwen3", True)):
        (pipeline,) = build_pipelines(plan, kvfold.anatomy(tiny_config(family)))
        assert pipeline.depth.unit_keys == expected


def test_a_plan_that_does_not_fit_is_refused(described):
    plan = Plan.from_dict({"depth": [{"method": "identity", "layers": [9]}]})
    with pytest.raises(PlanError, match="layer 9"):
        build_pipelines(plan, described)
