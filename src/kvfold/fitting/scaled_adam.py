"""Adam for weights of very different scales: each weight has a step of its own size.

Maps that come from a closed form have outputs that differ a hundredfold between layers, and so do
their inputs. One learning rate for all then drowns what was fitted in some weights and moves
nothing in others. Here a step is multiplied by a scale that says how far a weight may go.

Measured on layers 15 to 19 of SmolLM2 (joint CSA2, W=0, 24 rows of 512 tokens): steps in units of
each output's own spread bring the held-out attention error from .213 to .184 in 120 steps at a
rate of 1e-2. Adam in coordinates in which the inputs are white as well brings it to .188.
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

    groups: each with `params` and, if they have one, `scale`, which multiplies their steps: a
    number, or a tensor that broadcasts to them.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, group)

    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
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
        weight.sub_(mean / root * group["scale"], alpha=group["lr"] / (1 - slow ** state["step"]))
