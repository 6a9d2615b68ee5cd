"""Adam for weights of very different scales, in coordinates in which their inputs are alike.

Maps that come from a closed form have rows whose outputs differ a hundredfold between layers, and
inputs that lie along few directions. One learning rate for all weights then drowns what is fitted
in some and moves nothing in others. Here a step is measured by what it does to outputs: each
output row moves in units of its own standard deviation, and where a whitening matrix P is given
(`P P' = inverse covariance of the inputs`) Adam runs on `V = W P^-T`, whose inputs `P' x` are
white.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-30
"""Against 0 / 0 alone: gradients of a relative error may be tiny and still mean what they say."""


class ScaledAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980) with a scale for each weight.

    groups: each with `params`, one or more; `scale`, a number or a tensor that broadcasts to
    them, which multiplies their steps; `whitening`, (inputs, inputs) of a weight (outputs,
    inputs), or None; and `share`, which multiplies the learning rate.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "scale": 1.0, "whitening": None, "share": 1.0}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group)

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        whitening: Tensor | None = group["whitening"]
        gradient = weight.grad if whitening is None else weight.grad @ whitening
        assert gradient is not None
        state = self.state[weight]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(gradient)
            state["square"] = torch.zeros_like(gradient)
        state["step"] += 1
        slow, slower = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - slow)
        square = state["square"].mul_(slower).addcmul_(gradient, gradient, value=1 - slower)
        root = (square / (1 - slower ** state["step"])).sqrt_().add_(EPSILON)
        move = mean / root / (1 - slow ** state["step"])
        if whitening is not None:
            move = move @ whitening.T
        weight.sub_(move * group["scale"], alpha=group["lr"] * group["share"])
