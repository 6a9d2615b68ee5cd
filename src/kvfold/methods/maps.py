"""The maps that methods are made of: a linear base with an optional residual MLP on top."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvfold.methods.base import AffineMap


class ResidualMap(nn.Module):
    """`y = B x + MLP(x)`, the MLP starting at zero so that the closed form is the floor.

    in_width, out_width: values per token. bias: of the base. residual_hidden: hidden width of
    the MLP (two matrices without bias, GELU between); 0 leaves it out. The first card's reader is
    two of these, for K and for V, with 1,024 -> 1,536 -> 1,024 and no bias.
    """

    def __init__(
        self, in_width: int, out_width: int, *, bias: bool, residual_hidden: int = 0
    ) -> None:
        super().__init__()
        self.base = nn.Linear(in_width, out_width, bias=bias)
        nn.init.zeros_(self.base.weight)
        if bias:
            nn.init.zeros_(self.base.bias)
        self.mlp: nn.Sequential | None = None
        if residual_hidden:
            down = nn.Linear(residual_hidden, out_width, bias=False)
            nn.init.zeros_(down.weight)
            self.mlp = nn.Sequential(
                nn.Linear(in_width, residual_hidden, bias=False), nn.GELU(), down
            )

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_width) to (..., out_width)."""
        y: Tensor = self.base(x)
        return y if self.mlp is None else y + self.mlp(x)

    def affine(self, code_width: int, start: int) -> AffineMap | None:
        """This map as a function of a code of which it reads in_width columns from `start`.

        None where the residual MLP makes it non-linear.
        """
        if self.mlp is not None:
            return None
        weight = self.base.weight
        if weight.shape[1] != code_width:
            full = weight.new_zeros(weight.shape[0], code_width)
            full[:, start : start + weight.shape[1]] = weight
            weight = full
        return AffineMap(weight, affine_bias(self.base))


def residual_modules(module: nn.Module) -> dict[str, nn.Sequential]:
    """Every residual MLP within a module, by its name there."""
    named = module.named_modules()
    return {
        f"{name}.mlp": part.mlp
        for name, part in named
        if isinstance(part, ResidualMap) and part.mlp is not None
    }


def affine_bias(linear: nn.Linear) -> Tensor:
    """The bias of a linear layer, zeros where it has none."""
    return linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features)


def rms_normalize(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon)` over the last axis, computed in at least float32."""
    work = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    scale = torch.rsqrt(work.pow(2).mean(-1, keepdim=True) + epsilon)
    return (work * scale).to(x.dtype)
