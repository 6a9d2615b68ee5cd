"""Scalar codebooks for values that are close to normal: which levels a code stands for.

Computed, not tabulated: the Lloyd-Max conditions of the unit normal (Lloyd 1957, Max 1960) are
solved by Newton's method in float64, which takes a few steps where Lloyd's own iteration takes
tens of thousands. The normal's density is log-concave, so there is one solution only.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

GRID_FROM = 4096
"""From so many values on a CPU looks codes up in a grid."""

_NEWTON_STEPS = 50
_TOLERANCE = 1e-10


@functools.cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2**bits levels, ascending, with the least mean squared error on the unit normal.

    bits: 1 to 7. Each level is the mean of its cell, each cell's edges lie halfway between
    levels, and the levels are symmetric around zero.
    """
    positive = _positive_levels(bits)
    return tuple(torch.cat([-positive.flip(0), positive]).tolist())


def distortion(bits: int) -> float:
    """Mean squared error of `lloyd_max(bits)` on the unit normal: .3634 at 1 bit.

    Levels are the means of their cells, so the error is 1 less the levels' mean square.
    """
    levels = torch.tensor(lloyd_max(bits), dtype=torch.float64)
    edges = (levels[1:] + levels[:-1]) / 2
    below = functional.pad(torch.special.ndtr(edges), (1, 0))
    above = functional.pad(torch.special.ndtr(-edges), (0, 1))
    return float(1 - ((1 - below - above) * levels.square()).sum())


def nearest(values: Tensor, bits: int) -> Tensor:
    """Codes, int32, of the Lloyd-Max levels nearest to `values`, whatever a NaN's may be."""
    table = _tables(bits, values.device, values.dtype)
    if values.device.type == "cpu" and values.numel() >= GRID_FROM:
        return _by_grid(values, table)
    return torch.bucketize(values, table.edges, out_int32=True)


def levels(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """What codes, any shape and integer dtype below 2**bits, stand for."""
    table = _tables(bits, codes.device, dtype).levels
    # Several times faster than indexing with a tensor of several dimensions.
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


class _Tables(NamedTuple):
    """levels: ascending. edges: halfway between. below: of each grid cell, how many edges lie
    before it. edge_after: as `edges` with an infinity at the end. cells: grid cells for one.
    """

    levels: Tensor
    edges: Tensor
    below: Tensor
    edge_after: Tensor
    cells: float


@functools.cache
def _tables(bits: int, device: torch.device, dtype: torch.dtype) -> _Tables:
    # Tables made while inference mode is on could not be used by autograd later.
    with torch.inference_mode(mode=False):
        exact = torch.tensor(lloyd_max(bits), dtype=torch.float64)
        edges = ((exact[1:] + exact[:-1]) / 2).to(dtype)
        # Half the least distance of edges leaves room for rounding on both sides of a cell.
        cells = 2 / float((exact[1:] - exact[:-1]).min())
        reach = math.ceil(exact[-1] * cells)
        lower = (torch.arange(-reach, reach, dtype=torch.float64) - 0.25) / cells
        below = torch.searchsorted(edges.double(), lower).int()
        after = functional.pad(edges, (0, 1), value=torch.inf)
        return _Tables(
            exact.to(device, dtype), edges.to(device), below.to(device), after.to(device), cells
        )


def _by_grid(values: Tensor, table: _Tables) -> Tensor:
    """As `bucketize` finds, without its mispredicted branches: ten times faster on a CPU.

    A uniform grid says which edges lie before a value's cell; at most one lies in it.
    """
    flat, reach = values.reshape(-1), len(table.below) // 2
    cell = (flat * table.cells).floor_().add_(reach).nan_to_num_(0.0)
    below = table.below.index_select(0, cell.clamp_(0, 2 * reach - 1).int())
    codes = below + (flat > table.edge_after.index_select(0, below))
    return codes.view(values.shape)


def _positive_levels(bits: int) -> Tensor:
    count = 2 ** (bits - 1)
    # The high-resolution solution: levels are spread as the density's cube root.
    spread = (torch.arange(count, dtype=torch.float64) + count + 0.5) / (2 * count)
    found: Tensor = math.sqrt(3) * torch.special.ndtri(spread)
    for _ in range(_NEWTON_STEPS):
        step = _newton_step(found)
        found = found - step
        if step.abs().max() < _TOLERANCE:
            break
    return found


def _newton_step(found: Tensor) -> Tensor:
    """Solve `level - mean of its cell = 0` once, linearised; found: positive levels, ascending."""
    inner = (found[1:] + found[:-1]) / 2
    zero, infinity = found.new_zeros(1), found.new_full((1,), torch.inf)
    low, high = torch.cat([zero, inner]), torch.cat([inner, infinity])
    density_low, density_high = _density(low), _density(high)
    mass = torch.special.ndtr(-low) - torch.special.ndtr(-high)
    mean = (density_low - density_high) / mass
    # d mean / d edge, halved since an edge moves half as far as each of its levels.
    by_low = density_low * (mean - low) / mass / 2
    by_high = density_high * (high - mean).nan_to_num(posinf=0.0) / mass / 2
    jacobian = torch.eye(len(found), dtype=found.dtype)
    by_low[0] = 0.0  # the edge at zero does not move
    jacobian -= torch.diag(by_low + by_high)
    jacobian -= torch.diag(by_low[1:], -1) + torch.diag(by_high[:-1], 1)
    step: Tensor = torch.linalg.solve(jacobian, found - mean)
    return step


def _density(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
