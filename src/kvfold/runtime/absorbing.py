"""When attention sums codes in place of values, and the maps from codes that let it.

With weights w_s of slots, codes z_s and values D z_s + b, the sum of w_s (D z_s + b) is
D (sum of w_s z_s) + b (sum of w_s): one map for each query in place of one for each slot. With few
queries, as in decoding, that is far less work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.methods import DepthMethod, Pipeline
from kvfold.methods.base import AffineMap


class AffineMaps(NamedTuple):
    """From a code to a layer's keys and values; None where there is no such map to use."""

    keys: AffineMap | None
    values: AffineMap | None


def affine_maps(method: DepthMethod, layer: int) -> AffineMaps:
    """A layer's maps: those that are affine, and none where decoding is free."""
    if method.holds(layer):
        return AffineMaps(None, None)
    return AffineMaps(method.affine_keys(layer), method.affine_values(layer))


def stored_map(pipeline: Pipeline, affine: AffineMap) -> AffineMap:
    """A map of codes as one of quantised codes in their own basis: W z = (W R) (R^T z)."""
    return AffineMap(pipeline.rotated(affine.weight), affine.bias)


def with_ones(codes: Tensor) -> Tensor:
    """Codes (..., code_width) and a one behind each, in place of values to sum.

    A value map's bias counts once per unit of weight, so it is mapped from the sum of the ones.
    """
    return torch.cat([codes, codes.new_ones(*codes.shape[:-1], 1)], dim=-1)


def mapped_sums(
    pipeline: Pipeline, summed: Tensor, weight: Tensor, bias: Tensor, *, rotated: bool
) -> Tensor:
    """Sums of `with_ones` to sums of values: (..., kv_heads, queries, head_dim).

    summed: (..., kv_heads, queries, code_width + 1). weight: (kv_heads, code_width, head_dim);
    bias: (kv_heads, 1, head_dim). rotated: whether the codes were in the basis of their bits.
    """
    codes, ones = summed.tensor_split([-1], dim=-1)
    if rotated:
        codes = pipeline.unrotated(codes)
    return torch.matmul(codes, weight.to(codes.dtype)) + ones * bias.to(codes.dtype)


def absorbing_pays(
    *, heads: int, kv_heads: int, head_dim: int, code_width: int, queries: int, slots: int
) -> bool:
    """Whether absorbing values takes fewer multiplications than making them.

    queries: of each head. slots: that they read.
    """
    made = slots * (code_width * kv_heads * head_dim + heads * queries * head_dim)
    summed = heads * queries * code_width * (slots + head_dim)
    return summed < made
