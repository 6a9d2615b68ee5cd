"""Streamed second moments equal those of all rows at once."""

from __future__ import annotations

import pytest
import torch

from kvfold.errors import FitError
from kvfold.fitting import gram as gram_module
from kvfold.fitting.gram import Gram, Moments, Sketch

EXACT = 1e-10
"""Float64 rows: sums in another order."""
SINGLE = 1e-5
"""Float32 products of one batch."""


@pytest.fixture(autouse=True)
def _narrow_blocks(monkeypatch):
    monkeypatch.setattr(gram_module, "BLOCK", 5)


def _rows(count=60, width=13, offset=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return torch.randn(count, width, generator=generator, dtype=torch.float64) @ mix + offset


def _gram(x, y, batch):
    gram = Gram(x.shape[1], {"y": y.shape[1]})
    for start in range(0, len(x), batch):
        gram.add(x[start : start + batch], {"y": y[start : start + batch]})
    return gram


def _assert_equals_whole(gram, x, y, tolerance=EXACT):
    n = len(x)
    close = {"rtol": tolerance, "atol": tolerance * n}
    xc, yc = x - x.mean(0), y - y.mean(0)
    torch.testing.assert_close(gram.covariance(), xc.T @ xc / n, **close)
    torch.testing.assert_close(gram.covariance(centred=False), x.T @ x / n, **close)
    torch.testing.assert_close(gram.cross_covariance("y"), xc.T @ yc / n, **close)
    torch.testing.assert_close(gram.cross_covariance("y", centred=False), x.T @ y / n, **close)
    torch.testing.assert_close(gram.features.mean, x.mean(0), **close)
    torch.testing.assert_close(gram.targets["y"].variance, y.var(0, correction=0), **close)
    probe = torch.eye(x.shape[1], dtype=torch.float64)[:, :4]
    torch.testing.assert_close(gram.times(probe), (xc.T @ xc / n) @ probe, **close)
    torch.testing.assert_close(gram.times(probe, centred=False), (x.T @ x / n) @ probe, **close)


@pytest.mark.parametrize("batch", [60, 7, 1])
def test_batches_add_up_to_the_whole(batch):
    x, y = _rows(), _rows(width=3, seed=1)
    _assert_equals_whole(_gram(x, y, batch), x, y)


def test_leading_axes_are_rows():
    x, y = _rows(), _rows(width=3, seed=1)
    gram = Gram(13, {"y": 3})
    gram.add(x.view(4, 15, 13), {"y": y.view(4, 15, 3)})
    _assert_equals_whole(gram, x, y)


def test_merged_workers_equal_one():
    x, y = _rows(offset=20.0), _rows(width=3, seed=1, offset=-5.0)
    first, second = _gram(x[:25], y[:25], 10), _gram(x[25:], y[25:], 6)
    first.merge(second)
    assert first.count == 60
    _assert_equals_whole(first, x, y)
    empty = Gram(13, {"y": 3})
    empty.merge(first)
    _assert_equals_whole(empty, x, y)


def test_state_goes_on_bit_for_bit():
    x, y = _rows().float(), _rows(width=3, seed=1).float()
    whole, half = _gram(x, y, 10), _gram(x[:30], y[:30], 10)
    resumed = Gram(13, {"y": 3})
    resumed.load_state_dict(half.state_dict())
    for start in range(30, 60, 10):
        resumed.add(x[start : start + 10], {"y": y[start : start + 10]})
    assert torch.equal(resumed.covariance(), whole.covariance())
    assert torch.equal(resumed.cross_covariance("y"), whole.cross_covariance("y"))


def test_float32_rows_far_from_zero_keep_their_variance():
    x = _rows(offset=0.0).float() + 3000.0
    y = _rows(width=3, seed=1).float()
    _assert_equals_whole(_gram(x, y, 10), x.double(), y.double(), tolerance=SINGLE)


def test_bfloat16_rows_are_summed_in_more():
    x, y = _rows().bfloat16(), _rows(width=3, seed=1).bfloat16()
    _assert_equals_whole(_gram(x, y, 10), x.double(), y.double(), tolerance=SINGLE)


def test_moments_before_any_row_are_zero():
    moments = Moments(4)
    assert torch.equal(moments.mean, torch.zeros(4, dtype=torch.float64))
    assert torch.equal(moments.variance, torch.zeros(4, dtype=torch.float64))


def _sketch(x, batch, scale):
    sketch = Sketch(x.shape[1], 6, scale)
    for start in range(0, len(x), batch):
        sketch.add(x[start : start + batch])
    return sketch


def test_sketch_is_the_covariance_times_omega():
    x = _rows()
    sketch = _sketch(x, 7, torch.linspace(0.5, 2, 13))
    expected = torch.cov(x.T, correction=0) @ sketch.omega()
    torch.testing.assert_close(sketch.centred_product(), expected, rtol=EXACT, atol=60 * EXACT)


def test_merged_sketches_equal_one_and_foreign_ones_are_refused():
    x, scale = _rows(), torch.linspace(0.5, 2, 13)
    whole, first = _sketch(x, 10, scale), _sketch(x[:20], 10, scale)
    first.merge(_sketch(x[20:], 10, scale))
    torch.testing.assert_close(
        first.centred_product(), whole.centred_product(), rtol=EXACT, atol=60 * EXACT
    )
    with pytest.raises(FitError, match="share their scale"):
        first.merge(_sketch(x, 10, 2 * scale))
