"""One folded layer of an attached model: its attention module, its method, how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.anatomy import Family, LayerAnatomy, k_norm_weight
from kvfold.methods import AffineMap, DepthMethod

Reading = Literal["expanded", "shared", "absorbed", "dropped"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first rotary_dim values of each head, in halves.

    x: (batch, heads, seq, head_dim). cos, sin: (rows, seq, rotary_dim).
    """
    cos, sin = cos[:, None], sin[:, None]
    width = cos.shape[-1]
    turned, passed = x[..., :width], x[..., width:]
    half = width // 2
    swapped = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
    turned = turned * cos + swapped * sin
    return turned if passed.shape[-1] == 0 else torch.cat([turned, passed], dim=-1)


@dataclass(frozen=True)
class FoldedAttention:
    """A layer's static parts. The module is the model's own; only its forward is replaced."""

    index: int
    module: Any
    family: Family
    anatomy: LayerAnatomy
    method: DepthMethod
    reading: Reading

    @property
    def scaling(self) -> float:
        """What logits are multiplied by."""
        return float(self.module.scaling)

    def heads(self, flat: Tensor) -> Tensor:
        """(batch, seq, kv_width) to (batch, kv_heads, seq, head_dim)."""
        return flat.view(*flat.shape[:2], -1, self.anatomy.head_dim).transpose(1, 2)

    def finish_keys(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """k_norm and RoPE: keys (batch, kv_heads, seq, head_dim), pre-norm, pre-RoPE."""
        if self.anatomy.k_norm != "none":
            keys = self.module.k_norm(keys)
        return rotate(keys, cos, sin) if self.anatomy.rotary_dim else keys

    def finish_queries(self, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """q_norm and RoPE: queries (batch, heads, seq, head_dim)."""
        if self.anatomy.k_norm != "none":
            queries = self.module.q_norm(queries)
        return rotate(queries, cos, sin) if self.anatomy.rotary_dim else queries

    def unfold(self, codes: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Attention-ready keys and values of codes (batch, 1, slots, code_width)."""
        keys, values = self.method.decode(self.index, codes[:, 0])
        return self.finish_keys(self.heads(keys), cos, sin), self.heads(values)

    def absorbs_keys(self) -> bool:
        """Whether logits are computed against codes for the non-rotary part of the keys."""
        return (
            self.reading == "absorbed"
            and self.anatomy.rotary_dim < self.anatomy.head_dim
            and self.method.affine_keys(self.index) is not None
        )

    def absorbs_values(self) -> bool:
        """Whether values are summed as codes and mapped once."""
        return self.reading == "absorbed" and self.method.affine_values(self.index) is not None

    def head_map(self, affine: AffineMap) -> AffineMap:
        """An affine map with its outputs split by kv head: weight (kv_heads, head_dim, code)."""
        d = self.anatomy.head_dim
        return AffineMap(
            affine.weight.view(-1, d, affine.weight.shape[-1]), affine.bias.view(-1, d)
        )

    def key_scales(self, keys: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """rho and Gamma of the k_norm: 1 / rms of each key, (batch, kv_heads, seq, 1), and the
        norm's weight, (head_dim,); both None without a k_norm.
        """
        found = k_norm_weight(self.family, self.module)
        if found is None:
            return None, None
        weight, epsilon = found
        work = keys.float() if keys.element_size() < 4 else keys
        rho = torch.rsqrt(work.pow(2).mean(-1, keepdim=True) + epsilon).to(keys.dtype)
        return rho, weight
