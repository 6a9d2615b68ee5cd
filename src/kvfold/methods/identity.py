"""The exact no-op of the depth axis: the code is the layer's own keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.methods.base import Activations, DepthMethod, Source, kv_parts


class IdentityFold(DepthMethod):
    """Stores [K_l; V_l] of one layer and gives it back: `decode(encode(K, V)) = K, V`.

    layer: the layer served. kv_heads, head_dim: of its keys and values.
    """

    name = "identity"

    def __init__(self, layer: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.layers = (layer,)
        self.inputs = (Source("keys", layer), Source("values", layer))
        self.code_parts = kv_parts(kv_heads, head_dim)
        self.gate_source = Source("inputs", layer)

    def encode(self, activations: Activations) -> Tensor:
        """[K; V]: (batch, seq, 2 * kv_heads * head_dim)."""
        return torch.cat([activations[source] for source in self.inputs], dim=-1)

    def decode(self, layer: int, code: Tensor) -> tuple[Tensor, Tensor]:
        """The two halves of the code."""
        keys, values = code.chunk(2, dim=-1)
        return keys, values

    def holds(self, layer: int) -> bool:
        """Always: nothing is mapped."""
        return True
