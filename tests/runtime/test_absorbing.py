"""When values are summed as codes, and the maps that let them be."""

from __future__ import annotations

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.methods import build_pipelines
from kvfold.plan import Plan
from kvfold.runtime.absorbing import absorbing_pays, affine_maps

CSA2 = {"method": "csa2", "source": 1, "readers": [2]}


@pytest.mark.parametrize(
    ("queries", "slots", "pays"),
    [(1, 1024, True), (1, 1, False), (512, 1024, False), (1, 0, False)],
)
def test_it_pays_for_few_queries_of_many_slots(queries, slots, pays):
    shape = {"heads": 9, "kv_heads": 3, "head_dim": 64, "code_width": 576}
    assert absorbing_pays(**shape, queries=queries, slots=slots) == pays


def method_of(tiny_config, entry):
    plan = Plan.from_dict({"depth": [entry]})
    return build_pipelines(plan, anatomy(tiny_config("llama")))[0].depth


def test_layers_whose_maps_are_affine_absorb(tiny_config):
    method = method_of(tiny_config, CSA2)
    torch.manual_seed(0)
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter)
    maps = affine_maps(method, 2)
    code = torch.randn(1, 5, method.code_width)
    keys, values = method.decode(2, code)
    assert torch.allclose(torch.nn.functional.linear(code, *maps.keys), keys, atol=1e-4)
    assert torch.allclose(torch.nn.functional.linear(code, *maps.values), values, atol=1e-4)


def test_sources_and_residual_maps_do_not(tiny_config):
    assert affine_maps(method_of(tiny_config, CSA2), 1) == (None, None)
    assert affine_maps(method_of(tiny_config, {**CSA2, "residual_hidden": 8}), 2) == (None, None)
