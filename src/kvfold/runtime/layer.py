"""One folded layer of an attached model: its attention module, its method, how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.anatomy import Family, LayerAnatomy, k_norm_weight
from kvfold.methods import AffineMap, DepthMethod

Reading = Literal["expanded", "shared", "absorbed", "dropped"]


class Rotation(NamedTuple):
    """RoPE at some positions: `x * cos + swap(x) * sin`, swap exchanging a head's two halves.

    cos, sin: (rows, 1, seq, rotary_dim); the first half of `sin` is negative, which spares the
    negation and the concatenation of the usual form.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Rotation:
        """From cosines and sines (rows, seq, rotary_dim) as the model makes them."""
        first, second = sin.chunk(2, dim=-1)
        return cls(cos[:, None], torch.cat([-first, second], dim=-1)[:, None])

    def turn(self, x: Tensor) -> Tensor:
        """The first rotary_dim values of each head of x (batch, heads, seq, head_dim), turned."""
        width = self.cos.shape[-1]
        if width == x.shape[-1]:
            return torch.addcmul(x * self.cos, x.roll(width // 2, -1), self.sin)
        part = x[..., :width]
        turned = torch.addcmul(part * self.cos, part.roll(width // 2, -1), self.sin)
        return torch.cat([turned, x[..., width:]], dim=-1)


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

    def finish_keys(self, keys: Tensor, rotation: Rotation) -> Tensor:
        """k_norm and RoPE: keys (batch, kv_heads, seq, head_dim), pre-norm, pre-RoPE."""
        if self.anatomy.k_norm != "none":
            keys = self.module.k_norm(keys)
        return rotation.turn(keys) if self.anatomy.rotary_dim else keys

    def finish_queries(self, queries: Tensor, rotation: Rotation) -> Tensor:
        """q_norm and RoPE: queries (batch, heads, seq, head_dim)."""
        if self.anatomy.k_norm != "none":
            queries = self.module.q_norm(queries)
        return rotation.turn(queries) if self.anatomy.rotary_dim else queries

    def unfold(self, codes: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Attention-ready keys and values of codes (batch, 1, slots, code_width)."""
        keys, values = self.method.decode(self.index, codes[:, 0])
        return self.finish_keys(self.heads(keys), rotation), self.heads(values)

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
