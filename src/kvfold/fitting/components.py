"""Codes in closed form: principal components of a stack, or reduced-rank regression onto it.

Each source of the stack (one layer's keys or values) is scaled to a mean variance of 1 first, so
that no layer buys its share with its scale. With s the scales, m the mean and U the leading
eigenvectors: `z = U' (x / s)` and `x = s U z + (m - s U U' m / s)`; the encoder needs no bias. If
the inputs are others than the targets, U comes from the fitted targets' covariance and the
encoder is `U' B`, with B the ridge regression onto the scaled targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.fitting.gram import Gram, Sketch
from kvfold.fitting.ridge import DEFAULT_RIDGE, cholesky

EXACT_WIDTH = 1024
"""Up to this width all eigenvectors are computed, in float64."""
SKETCH_WIDTH = 8192
"""Wider stacks are sketched instead of keeping their whole Gram matrix."""
TOLERANCE = 1e-4
"""Growth of the variance held, as a share of it, below which another round is not worth it."""
MAX_ROUNDS = 24


class Code(NamedTuple):
    """A fitted code, float64: `z = encoder @ x`, `target = decoder @ z + bias` on the stack.

    mean, variance: of the stacked targets; predicted: variance of what the code gives back.
    """

    encoder: Tensor
    decoder: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    predicted: Tensor


def sketch_columns(rank: int, width: int) -> int:
    """Columns of a sketch that finds `rank` components of a stack."""
    return min(width, max(2 * rank, rank + 64))


def source_scales(variance: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Root mean variance of each source, repeated over its values: (sum of widths,)."""
    parts = torch.split(variance, list(widths))
    means = torch.stack([part.mean() for part in parts])
    floor = 1e-12 * means.max().clamp(min=1e-30)
    return torch.cat(
        [mean.clamp(min=floor).sqrt().expand(len(p)) for mean, p in zip(means, parts, strict=True)]
    )


def principal_components(gram: Gram | Sketch, widths: tuple[int, ...], rank: int) -> Code:
    """The code of `rank` values that keeps most of a stack's scaled variance.

    widths: of the sources in the stack, in order.
    """
    scale = source_scales(gram.features.variance, widths)
    if isinstance(gram, Sketch):
        basis, held = _sketched_basis(gram, scale, rank)
    else:
        basis, held = _gram_basis(gram, scale, rank)
    features = gram.features
    return _code(
        basis, basis.T / scale, scale, held, features.mean, features.mean, features.variance
    )


def reduced_rank(
    gram: Gram,
    targets: tuple[str, ...],
    rank: int,
    *,
    ridge: float = DEFAULT_RIDGE,
    name: str,
) -> Code:
    """The code of `rank` values of the features that predicts the scaled targets best.

    targets: names in the Gram matrix, stacked in this order. Raises `FitError` if the features
    are degenerate.
    """
    moments = [gram.targets[target] for target in targets]
    scale = source_scales(
        torch.cat([m.variance for m in moments]), tuple(len(m.sums) for m in moments)
    )
    factor = cholesky(gram, ridge=ridge, centred=True, name=name)
    cross = torch.cat([gram.cross_covariance(target) for target in targets], dim=1) / scale
    half = torch.linalg.solve_triangular(factor, cross, upper=False)
    basis = _right_singular(half, rank)
    held = _held(basis, half.T @ (half @ basis))
    regression = torch.linalg.solve_triangular(factor.T, half @ basis, upper=True).T
    mean = torch.cat([m.mean for m in moments])
    variance = torch.cat([m.variance for m in moments])
    return _code(basis, regression, scale, held, gram.features.mean, mean, variance)


def _code(
    basis: Tensor,
    encoder: Tensor,
    scale: Tensor,
    held: Tensor,
    input_mean: Tensor,
    mean: Tensor,
    variance: Tensor,
) -> Code:
    decoder = scale[:, None] * basis
    bias = mean - decoder @ (encoder @ input_mean)
    return Code(encoder, decoder, bias, mean, variance, scale.square() * held)


def _held(basis: Tensor, image: Tensor) -> Tensor:
    """Diagonal of U (U' C U) U' from U and C U: the variance of each value that U keeps."""
    inner = basis.T @ image
    return ((basis @ inner) * basis).sum(dim=1)


def _gram_basis(gram: Gram, scale: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    if gram.width <= EXACT_WIDTH:
        matrix = gram.covariance() / torch.outer(scale, scale)
        exact = _leading(matrix, rank)
        return exact, _held(exact, matrix @ exact)

    def apply(x: Tensor) -> Tensor:
        s = scale.to(x.dtype)[:, None]
        return gram.times(x / s) / s

    basis = top_eigenvectors(apply, gram.width, rank, scale.device)
    return basis.double(), _held(basis, apply(basis)).double()


def _leading(matrix: Tensor, rank: int) -> Tensor:
    if len(matrix) <= EXACT_WIDTH:
        vectors: Tensor = torch.linalg.eigh(matrix).eigenvectors
        return vectors[:, -rank:].flip(1)
    single = matrix.float()
    return top_eigenvectors(lambda x: single @ x, len(matrix), rank, matrix.device).double()


def _right_singular(half: Tensor, rank: int) -> Tensor:
    """Leading right singular vectors of half (few rows, many columns): (columns, rank)."""
    rank = min(rank, *half.shape)
    if half.shape[1] <= half.shape[0]:
        return _leading(half.T @ half, rank)
    return _orthonormal(half.T @ _leading(half @ half.T, rank))


def top_eigenvectors(
    apply: Callable[[Tensor], Tensor], width: int, rank: int, device: torch.device | None = None
) -> Tensor:
    """Leading eigenvectors of a positive operator by block subspace iteration: (width, rank).

    apply: multiplies (width, columns) float32 by the operator. A few columns more than asked for
    are carried along. Rounds stop when the variance that they hold no longer grows; one
    Rayleigh-Ritz step at the end puts the vectors in order.
    """
    columns = min(width, rank + max(32, rank // 8))
    generator = torch.Generator().manual_seed(0)
    basis = _orthonormal(torch.randn(width, columns, generator=generator).to(device))
    held = 0.0
    for _ in range(MAX_ROUNDS):
        image = apply(basis)
        now = _trace(basis, image)
        if now - held < TOLERANCE * now:
            break
        held = now
        del basis  # a wide stack's is large
        basis = _orthonormal(image)
    order = torch.linalg.eigh((basis.T @ image).double()).eigenvectors.flip(1)
    ordered: Tensor = basis @ order[:, :rank].to(basis.dtype)
    return ordered


def _trace(basis: Tensor, image: Tensor) -> float:
    blocks = zip(torch.split(basis, 1024), torch.split(image, 1024), strict=True)
    return sum(float((left * right).sum()) for left, right in blocks)


def _orthonormal(x: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(x).Q
    return basis


def _sketched_basis(sketch: Sketch, scale: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Nystrom: C is about `Y (Omega' Y)^-1 Y'` for Y = C Omega, all in scaled coordinates."""
    omega = sketch.omega() * scale[:, None]
    image = sketch.centred_product() / scale[:, None]
    core = omega.T @ image
    core = (core + core.T) / 2
    del omega
    values, vectors = torch.linalg.eigh(core)
    keep = values > 1e-10 * values[-1]
    root = image @ (vectors[:, keep] / values[keep].sqrt())
    basis = _right_singular(root.T, rank)
    return basis, _held(basis, root @ (root.T @ basis))
