"""Codes in closed form against full decompositions of all rows."""

from __future__ import annotations

import pytest
import torch

from kvfold.fitting import components
from kvfold.fitting.components import (
    principal_components,
    reduced_rank,
    sketch_columns,
    source_scales,
    top_eigenvectors,
)
from kvfold.fitting.gram import Gram, Sketch

CLOSE = 1e-8
"""Float64 eigenvectors, through reconstructions."""
WIDTHS = (8, 8, 12)


def _stack(count=300, seed=0, decay=1.0):
    """Correlated sources of very different scales, away from zero."""
    generator = torch.Generator().manual_seed(seed)
    width = sum(WIDTHS)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    strength = torch.arange(1, width + 1, dtype=torch.float64).pow(-decay)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64) * strength @ mix
    scale = torch.cat([torch.full((w,), s) for w, s in zip(WIDTHS, (0.01, 1.0, 30.0), strict=True)])
    return (x + 2.0) * scale


def _gram(x):
    gram = Gram(x.shape[1])
    gram.add(x)
    return gram


def _error(code, x, widths=WIDTHS):
    scale = source_scales(x.var(0, correction=0), widths)
    again = x @ code.encoder.T @ code.decoder.T + code.bias
    return float(((again - x) / scale).pow(2).sum() / len(x))


def test_error_is_the_sum_of_the_eigenvalues_left_out():
    x = _stack()
    scaled = (x - x.mean(0)) / source_scales(x.var(0, correction=0), WIDTHS)
    eigenvalues = torch.linalg.eigvalsh(scaled.T @ scaled / len(x))
    for rank in (1, 5, 20):
        code = principal_components(_gram(x), WIDTHS, rank)
        assert _error(code, x) == pytest.approx(float(eigenvalues[:-rank].sum()), rel=CLOSE)


def test_full_rank_gives_everything_back():
    x = _stack()
    code = principal_components(_gram(x), WIDTHS, 28)
    torch.testing.assert_close(x @ code.encoder.T @ code.decoder.T + code.bias, x)


def test_sources_weigh_alike_whatever_their_scale():
    x = _stack()
    code = principal_components(_gram(x), WIDTHS, 9)
    other = x * torch.cat([torch.full((w,), s) for w, s in zip(WIDTHS, (7, 0.3, 2), strict=True)])
    again = principal_components(_gram(other), WIDTHS, 9)
    assert _error(code, x) == pytest.approx(_error(again, other), rel=CLOSE)


def test_smaller_codes_are_the_start_of_larger_ones():
    x = _stack()
    small, large = (principal_components(_gram(x), WIDTHS, rank) for rank in (4, 9))
    torch.testing.assert_close(small.encoder, large.encoder[:4])
    torch.testing.assert_close(small.decoder, large.decoder[:, :4])


def test_constant_sources_do_not_break_the_others():
    x = _stack()
    x[:, :8] = 3.0
    code = principal_components(_gram(x), WIDTHS, 20)
    again = x @ code.encoder.T @ code.decoder.T + code.bias
    torch.testing.assert_close(again, x, rtol=1e-6, atol=1e-6)


def test_wide_stacks_by_iteration_hold_as_much_as_the_exact_ones(monkeypatch):
    x = _stack(decay=0.7)
    exact = principal_components(_gram(x), WIDTHS, 6)
    monkeypatch.setattr(components, "EXACT_WIDTH", 4)
    iterated = principal_components(_gram(x), WIDTHS, 6)
    assert _error(iterated, x) == pytest.approx(_error(exact, x), rel=1e-3)


def test_iteration_finds_eigenvectors_in_order():
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(200, 200, generator=generator)).Q
    values = torch.arange(1, 201).float().pow(-0.8)
    matrix = basis * values @ basis.T
    found = top_eigenvectors(lambda v: matrix @ v, 200, 10)
    torch.testing.assert_close(found.T @ found, torch.eye(10), rtol=0, atol=1e-5)
    rayleigh = (found.T @ matrix @ found).diagonal()
    torch.testing.assert_close(rayleigh, values[:10], rtol=1e-3, atol=0)


def test_sketched_stacks_come_close_to_the_exact_ones():
    generator = torch.Generator().manual_seed(4)
    strength = torch.arange(1, 121, dtype=torch.float64).pow(-1.0)
    mix = torch.linalg.qr(torch.randn(120, 120, generator=generator, dtype=torch.float64)).Q
    x = torch.randn(2000, 120, generator=generator, dtype=torch.float64) * strength @ mix + 1.0
    widths = (60, 60)
    sketch = Sketch(120, sketch_columns(10, 120), source_scales(x[:100].var(0), widths))
    sketch.add(x[:1000])
    sketch.add(x[1000:])
    sketched = _error(principal_components(sketch, widths, 10), x, widths)
    exact = _error(principal_components(_gram(x), widths, 10), x, widths)
    assert exact <= sketched < 1.1 * exact


def _with_targets(x, y):
    gram = Gram(x.shape[1], {"a": 8, "b": 8, "c": 12})
    gram.add(x, dict(zip("abc", y.split(list(WIDTHS), dim=1), strict=True)))
    return gram


def _inputs_and_targets():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(400, 10, generator=generator, dtype=torch.float64) + 1.0
    y = _stack(400, seed=6)
    y = y + y.std(0) * (x @ torch.randn(10, 28, generator=generator, dtype=torch.float64))
    return x, y


@pytest.mark.parametrize("rank", [1, 3, 10])
def test_reduced_rank_is_the_best_map_of_its_rank(rank):
    x, y = _inputs_and_targets()
    scale = source_scales(y.var(0, correction=0), WIDTHS)
    code = reduced_rank(_with_targets(x, y), ("a", "b", "c"), rank, ridge=0.0, name="the test")
    predicted = (x @ code.encoder.T @ code.decoder.T + code.bias - y.mean(0)) / scale
    xc, yc = x - x.mean(0), (y - y.mean(0)) / scale
    fitted = xc @ torch.linalg.lstsq(xc, yc).solution
    left, values, right = torch.linalg.svd(fitted, full_matrices=False)
    best = left[:, :rank] * values[:rank] @ right[:rank]
    torch.testing.assert_close(predicted, best, rtol=1e-6, atol=1e-6)


def test_rank_beyond_the_inputs_finds_no_more_than_they_have():
    x, y = _inputs_and_targets()
    code = reduced_rank(_with_targets(x, y), ("a", "b", "c"), 14, ridge=0.0, name="the test")
    assert code.encoder.shape == (10, 10)
