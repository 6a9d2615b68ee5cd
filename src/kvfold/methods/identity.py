"""The exact no-op of the depth axis: the code is the layer's own keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.methods.base import Activations, DepthMethod, Source


class IdentityFold(DepthMethod):
    """Stores [K_l; V_l] of one layer and gives it back: `decode(encode(K, V)) = K, V`.

    layer: the layer served. kv_width: its kv_heads * head_dim.
    """

    name = "identity"

    def __init__(self, layer: int, kv_width: int) -> None:
        super().__init__()
        self.layers = (layer,)
        self.inputs = (Source("keys", layer), Source("values", layer))
        self.code_width = 2 * kv_width

    def encode(self, activations: Activations) -> Tensor:
        """[K; V]: (batch, seq, 2 * kv_width)."""
        return torch.cat([activations[source] for source in self.inputs], dim=-1)

    def decode(self, layer: int, code: Tensor) -> tuple[Tensor, Tensor]:
        """The two halves of the code."""
        keys, values = code.chunk(2, dim=-1)
        return keys, values

    def holds(self, layer: int) -> bool:
        """Always: nothing is mapped."""
        return True
