"""Ridge regression from streamed moments equals the textbook's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvfold.errors import FitError
from kvfold.fitting.gram import Gram
from kvfold.fitting.ridge import fit_linears

CLOSE = 1e-8
"""Normal equations in float64 against a QR of the data."""


def _data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 7, generator=generator, dtype=torch.float64) + 2.0
    truth = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    return x, x @ truth + 0.1 * noise + 1.0


def _fitted(x, y, *, bias, ridge):
    gram = Gram(x.shape[1], {"y": y.shape[1]})
    for start in range(0, len(x), 64):
        gram.add(x[start : start + 64], {"y": y[start : start + 64]})
    linear = nn.Linear(x.shape[1], y.shape[1], bias=bias, dtype=torch.float64)
    fit_linears(gram, {"y": linear}, ridge=ridge, name="the test")
    return linear


def test_without_ridge_it_is_least_squares():
    x, y = _data()
    linear = _fitted(x, y, bias=False, ridge=0.0)
    expected = torch.linalg.lstsq(x, y).solution.T
    torch.testing.assert_close(linear.weight.detach(), expected, rtol=CLOSE, atol=CLOSE)


def test_bias_is_the_intercept_of_least_squares():
    x, y = _data()
    linear = _fitted(x, y, bias=True, ridge=0.0)
    expected = torch.linalg.lstsq(torch.cat([x, torch.ones(200, 1)], 1), y).solution
    torch.testing.assert_close(linear.weight.detach(), expected[:-1].T, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(linear.bias.detach(), expected[-1], rtol=CLOSE, atol=CLOSE)


def test_ridge_is_relative_to_the_mean_diagonal():
    x, y = _data()
    linear = _fitted(x, y, bias=True, ridge=0.3)
    xc, yc = x - x.mean(0), y - y.mean(0)
    gram = xc.T @ xc
    penalty = 0.3 * gram.diagonal().mean() * torch.eye(7)
    expected = torch.linalg.solve(gram + penalty, xc.T @ yc).T
    torch.testing.assert_close(linear.weight.detach(), expected, rtol=CLOSE, atol=CLOSE)
    scaled = _fitted(10 * x, y, bias=True, ridge=0.3)
    torch.testing.assert_close(10 * scaled.weight, linear.weight, rtol=CLOSE, atol=CLOSE)


def test_degenerate_features_are_named_with_a_remedy():
    x = torch.zeros(20, 3, dtype=torch.float64)
    with pytest.raises(FitError, match=r"features of the test.*raise ridge"):
        _fitted(x, torch.ones(20, 2, dtype=torch.float64), bias=True, ridge=0.0)
