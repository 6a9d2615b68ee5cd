"""Regenerated keys that vary as much as the real ones.

A least-squares map predicts the mean of what it can't know, so its keys lie closer together than
the keys they stand for. Attention then finds all of the history about equally uninteresting, and
weight moves to the exact tokens. The remedy is in closed form too: each key head's prediction is
stretched about its mean, `k' = m + gamma (k - m)` with `gamma = (var(K) / var(k))^(strength / 2)`,
both variances summed over the head. The mean squared error grows by it, the error of attention
falls. Keys that a k_norm follows keep their plain fit: the norm gives them their length back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvfold.anatomy import Anatomy
from kvfold.methods import Source

DEFAULT_STRENGTH = 0.5
"""1 restores the variance in full, 0 leaves the least-squares fit as it is.

Perplexity still falls beyond 0.5, divergence from the base model no longer does.
"""
MOST_GAIN = 3.0
"""A head that is hardly predicted at all is not stretched further than this."""

Stretch = Callable[[Source, nn.Linear, Tensor, Tensor, Tensor], None]
"""Takes a target, its fitted map, the target's variance, the prediction's, and the mean."""


def stretch_keys(anatomy: Anatomy, strength: float) -> Stretch:
    """What stretches a map in place if its target is keys without a k_norm.

    The three tensors are (outputs,): variance of the target, variance of the map's prediction,
    mean of both. Maps without a bias are left alone, since they can't hold the mean.
    """

    @torch.no_grad()
    def stretch(
        target: Source, linear: nn.Linear, variance: Tensor, predicted: Tensor, mean: Tensor
    ) -> None:
        layer = anatomy.layers[target.layer] if target.kind == "keys" else None
        if layer is None or layer.k_norm != "none" or linear.bias is None or strength == 0:
            return
        gain = _gain(variance, predicted, layer.head_dim, strength).to(linear.weight.device)
        linear.weight.mul_(gain[:, None])
        linear.bias.copy_(gain * linear.bias + (1 - gain) * mean)

    return stretch


def _gain(variance: Tensor, predicted: Tensor, head_dim: int, strength: float) -> Tensor:
    whole = variance.view(-1, head_dim).sum(1)
    kept = predicted.view(-1, head_dim).sum(1).clamp_min(1e-12 * float(whole.max()) + 1e-30)
    gain = (whole / kept).pow(strength / 2).clamp(1.0, MOST_GAIN)
    return gain.repeat_interleave(head_dim)
