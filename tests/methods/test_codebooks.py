"""Lloyd-Max codebooks of the unit normal."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.methods.codebooks import GRID_FROM, distortion, levels, lloyd_max, nearest

PUBLISHED = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
"""Mean squared errors in Max's paper (1960), to the digits given there."""
BITS = range(1, 8)


def normal_density(x):
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_the_means_of_their_cells(bits):
    table = torch.tensor(lloyd_max(bits), dtype=torch.float64)
    assert len(table) == 2**bits and (table.diff() > 0).all()
    assert torch.equal(table, -table.flip(0))
    edges = torch.cat([torch.tensor([-12.0]), (table[1:] + table[:-1]) / 2, torch.tensor([12.0])])
    for low, high, level in zip(edges[:-1], edges[1:], table, strict=True):
        x = torch.linspace(float(low), float(high), 20001, dtype=torch.float64)
        mass = torch.trapezoid(normal_density(x), x)
        mean = torch.trapezoid(x * normal_density(x), x) / mass
        assert abs(float(mean - level)) < 1e-6


@pytest.mark.parametrize(("bits", "expected"), PUBLISHED.items())
def test_distortion_is_the_published_one(bits, expected):
    assert distortion(bits) == pytest.approx(expected, rel=3e-3)


@pytest.mark.parametrize("bits", BITS)
def test_distortion_is_what_a_sample_shows(bits):
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(bits), dtype=torch.float64)
    error = x - levels(nearest(x, bits), bits, x.dtype)
    assert float(error.square().mean()) == pytest.approx(distortion(bits), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", BITS)
def test_many_values_get_the_codes_that_few_get(bits, dtype):
    """Codes found in a grid equal those of a search, also at edges and beside them."""
    table = torch.tensor(lloyd_max(bits), dtype=torch.float64)
    edges = ((table[1:] + table[:-1]) / 2).to(dtype)
    up, down = torch.nextafter(edges, edges + 1), torch.nextafter(edges, edges - 1)
    extremes = torch.tensor([-torch.inf, -1e30, -0.0, 0.0, 1e30, torch.inf], dtype=dtype)
    random = torch.randn(2 * GRID_FROM, generator=torch.Generator().manual_seed(0)).to(dtype)
    cells = torch.arange(-400, 400, dtype=dtype) / (2 / table.diff().min()).to(dtype)
    values = torch.cat([edges, up, down, extremes, random, cells])
    few = torch.cat([nearest(part, bits) for part in values.split(GRID_FROM - 1)])
    assert torch.equal(nearest(values, bits), few)


@given(st.floats(-6, 6), st.sampled_from(BITS))
def test_the_code_is_that_of_the_nearest_level(value, bits):
    table = torch.tensor(lloyd_max(bits), dtype=torch.float64)
    x = torch.tensor([value], dtype=torch.float64)
    chosen = levels(nearest(x, bits), bits, x.dtype)
    assert float((chosen - x).abs()) == pytest.approx(float((table - x).abs().min()), abs=1e-12)


def test_a_nan_gets_some_code_and_raises_nothing():
    for count in (1, GRID_FROM):
        codes = nearest(torch.full((count,), torch.nan), 3)
        assert ((codes >= 0) & (codes < 8)).all()


def test_tables_first_made_in_inference_mode_serve_autograd_later():
    with torch.inference_mode():
        levels(torch.zeros(1, dtype=torch.uint8), 7, torch.float16)
    weight = torch.ones(1, dtype=torch.float16, requires_grad=True)
    (weight * levels(torch.zeros(1, dtype=torch.uint8), 7, torch.float16)).sum().backward()
    assert weight.grad is not None
