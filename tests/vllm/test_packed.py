"""Codes as rows of bytes."""

from __future__ import annotations

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.methods import build_pipelines
from kvfold.plan import Plan
from kvfold.vllm.packed import PackedCode

LATENT = {"method": "latent", "layers": [1, 2], "rank": 24, "value_rank": 17}


def pipeline_of(tiny_config, bits):
    plan = Plan.from_dict({"depth": [LATENT], "bits": bits})
    return build_pipelines(plan, anatomy(tiny_config("llama")))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_without_bits_come_back_as_they_were(tiny_config, dtype):
    packed = PackedCode(pipeline_of(tiny_config, []), dtype)
    codes = torch.randn(5, 41).to(dtype)
    rows = packed.pack(codes)
    assert rows.dtype == torch.uint8
    assert rows.shape == (5, packed.row_bytes) == (5, 41 * dtype.itemsize)
    assert torch.equal(packed.unpack(rows), codes)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(8, 4), (4, 3), (1, 8)])
def test_quantised_codes_come_back_as_the_pipeline_rounds_them(tiny_config, key_bits, value_bits):
    entry = {
        "method": "turboquant",
        "layers": [1, 2],
        "key_bits": key_bits,
        "value_bits": value_bits,
    }
    pipeline = pipeline_of(tiny_config, [entry])
    packed = PackedCode(pipeline, torch.float32)
    codes = torch.randn(7, 41)
    rows = packed.pack(codes)
    assert rows.shape == (7, packed.row_bytes)
    assert packed.row_bytes < 41 * 2
    assert torch.allclose(packed.unpack(rows), pipeline.rounded_codes(codes[None])[0], atol=1e-6)


def test_codes_may_stay_in_the_basis_they_are_stored_in(tiny_config):
    """Then maps of codes are turned instead."""
    bits = [{"method": "turboquant", "layers": [1, 2]}]
    pipeline = pipeline_of(tiny_config, bits)
    packed = PackedCode(pipeline, torch.float32)
    rows, weight = packed.pack(torch.randn(6, 41)), torch.randn(5, 41)
    plain, turned = packed.unpack(rows), packed.unpack(rows, rotated=True)
    assert not torch.allclose(turned, plain, atol=1e-2)
    assert torch.allclose(pipeline.unrotated(turned), plain, atol=1e-5)
    assert torch.allclose(turned @ pipeline.rotated(weight).T, plain @ weight.T, atol=1e-4)


def test_slots_without_a_finite_scale_are_told_of_once_and_spoil_no_others(tiny_config, caplog):
    bits = [{"method": "turboquant", "layers": [1, 2]}]
    packed = PackedCode(pipeline_of(tiny_config, bits), torch.float32)
    codes = torch.randn(4, 41)
    well = packed.pack(codes)
    assert not caplog.records
    codes[2] = 1e6
    rows = packed.pack(codes)
    packed.pack(codes)
    assert torch.equal(rows[[0, 1, 3]], well[[0, 1, 3]])
    assert not torch.isfinite(packed.unpack(rows)[2]).all()
    (told,) = caplog.messages
    assert "layers [1, 2]" in told and "65,504" in told
