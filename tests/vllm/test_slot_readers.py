"""When values are absorbed."""

from __future__ import annotations

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.methods import build_pipelines
from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from kvfold.vllm.slot_readers import absorbable

CSA2 = {"method": "csa2", "source": 1, "readers": [2]}


def method_of(tiny_config, entry):
    plan = Plan.from_dict({"depth": [entry]})
    return build_pipelines(plan, anatomy(tiny_config("llama")))[0].depth


def test_layers_whose_maps_are_affine_absorb(tiny_config):
    method = method_of(tiny_config, CSA2)
    torch.manual_seed(0)
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter)
    maps = absorbable(method, 2)
    code = torch.randn(1, 5, method.code_width)
    keys, values = method.decode(2, code)
    assert torch.allclose(torch.nn.functional.linear(code, *maps.keys), keys, atol=1e-4)
    assert torch.allclose(torch.nn.functional.linear(code, *maps.values), values, atol=1e-4)


def test_sources_and_residual_maps_do_not(tiny_config):
    assert absorbable(method_of(tiny_config, CSA2), 1) is None
    assert absorbable(method_of(tiny_config, {**CSA2, "residual_hidden": 8}), 2) is None
