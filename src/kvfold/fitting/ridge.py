"""Ridge regression in closed form, from streamed second moments.

`W = Y'X (X'X + lambda I)^-1`, on centred data with the intercept `b = mean(y) - W mean(x)` where
the map has a bias, on raw data without one. lambda is `ridge` times the mean diagonal of X'X, so
that it means the same whatever the scale and the number of tokens. The design's measurements
(lambda 1 on centred sums of 58k normalised tokens) are about `ridge=1.7e-5`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvfold.errors import FitError
from kvfold.fitting.gram import Gram

DEFAULT_RIDGE = 1e-5


class RidgeFit(NamedTuple):
    """A fitted map `y = weight @ x + bias`, float64; bias is None for a map without one."""

    weight: Tensor
    bias: Tensor | None


def cholesky(gram: Gram, *, ridge: float, centred: bool, name: str) -> Tensor:
    """The lower Cholesky factor of `X'X / count + lambda I`, float64; `FitError` if singular."""
    matrix = gram.covariance(centred=centred)
    matrix.diagonal().add_(ridge * matrix.diagonal().mean())
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) != 0 or not bool(torch.isfinite(factor).all()):
        raise FitError(
            f"the features of {name} must span their space: their {gram.width} values are "
            f"linearly dependent over {gram.count} tokens at ridge={ridge:g}; fit on more text "
            "or raise ridge"
        )
    lower: Tensor = factor
    return lower


def solve(gram: Gram, target: str, factor: Tensor, *, centred: bool) -> RidgeFit:
    """The map from the features to one target; `factor` from `cholesky` with the same centring."""
    weight = torch.cholesky_solve(gram.cross_covariance(target, centred=centred), factor).T
    if not centred:
        return RidgeFit(weight, None)
    return RidgeFit(weight, gram.targets[target].mean - weight @ gram.features.mean)


@torch.no_grad()
def fit_linears(
    gram: Gram,
    linears: dict[str, nn.Linear],
    *,
    ridge: float = DEFAULT_RIDGE,
    name: str,
    finish: Callable[[str, nn.Linear, Tensor, Tensor, Tensor], None] | None = None,
) -> None:
    """Fit one linear layer per target name, in place.

    finish: called with each target that has a bias, its layer, the target's variance, the
    prediction's and the mean (see `kvfold.fitting.dispersion`).

    name: of the features, for messages. Raises `FitError` if the features are degenerate.
    """
    factors: dict[bool, Tensor] = {}
    for target, linear in linears.items():
        centred = linear.bias is not None
        if centred not in factors:
            factors[centred] = cholesky(gram, ridge=ridge, centred=centred, name=name)
        fit = solve(gram, target, factors[centred], centred=centred)
        linear.weight.copy_(fit.weight)
        if fit.bias is not None:
            linear.bias.copy_(fit.bias)
            if finish is not None:
                moments = gram.targets[target]
                predicted = (fit.weight * gram.times(fit.weight.T).T).sum(dim=1)
                finish(target, linear, moments.variance, predicted, moments.mean)
