"""CED: history keys and values regenerated from one early hidden state.

`K_l, V_l = P_l(H_s)`, H_s the output of the first s layers (source: the first model card, after
DeepSeek's cross-layer encoder-decoder design). With P_l two matrices without bias, s=16 and layer
19 of Qwen3.5-4B this is the card's projector of 2 * 2,560 * 1,024 = 5,242,880 values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvfold.methods.base import (
    Activations,
    AffineMap,
    CodePart,
    DepthMethod,
    Problem,
    Regression,
    Source,
    kv_parts,
)
from kvfold.methods.maps import ResidualMap, rms_normalize


class CedMaps(nn.Module):
    """The projector P_l of each layer, from H_s to that layer's keys and values.

    split: s. layers: the layers served. hidden_size: of H_s. kv_heads, head_dim: of each layer's
    keys and values. bias: of each matrix. normalize: divide H_s by its root mean square first.
    """

    def __init__(
        self,
        split: int,
        layers: tuple[int, ...],
        hidden_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = True,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.source = Source("hidden", split)
        self.layers = layers
        self.hidden_size = hidden_size
        self.kv_parts = kv_parts(kv_heads, head_dim)
        self.kv_width = kv_width = kv_heads * head_dim
        self.normalize = normalize
        names = [str(layer) for layer in layers]
        self.keys = nn.ModuleDict({n: ResidualMap(hidden_size, kv_width, bias=bias) for n in names})
        self.values = nn.ModuleDict(
            {n: ResidualMap(hidden_size, kv_width, bias=bias) for n in names}
        )

    def features(self, activations: Activations) -> Tensor:
        """What the projectors read: H_s, normalised if asked for; (batch, seq, hidden)."""
        hidden = activations[self.source]
        return rms_normalize(hidden) if self.normalize else hidden

    def project(self, layer: int, features: Tensor) -> tuple[Tensor, Tensor]:
        """P_l of the features: keys and values, each (batch, seq, kv_width)."""
        name = str(layer)
        return self.keys[name](features), self.values[name](features)

    def problems(self) -> tuple[Problem, ...]:
        """Each matrix regresses its layer's keys or values on the features."""
        key = f"ced H_{self.source.layer} normalize={self.normalize}"
        made = []
        for layer in self.layers:
            for kind, maps in (("keys", self.keys), ("values", self.values)):
                target = Source("keys" if kind == "keys" else "values", layer)
                linear = maps[str(layer)].base
                made.append(
                    Regression(0, key, self.features, (self.source,), target, linear)  # type: ignore[arg-type]
                )
        return tuple(made)


class CedFold(DepthMethod):
    """CED for one or more layers.

    Stores H_s once for all of its layers, or the projected keys and values themselves where they
    take fewer values (the card's case of one source layer).
    """

    name = "ced"

    def __init__(self, maps: CedMaps) -> None:
        super().__init__()
        self.maps = maps
        self.layers = maps.layers
        self.inputs = (maps.source,)
        projected_width = 2 * maps.kv_width * len(maps.layers)
        self.stores_projected = projected_width < maps.hidden_size
        self.code_parts = (
            maps.kv_parts * len(maps.layers)
            if self.stores_projected
            else (CodePart("both", 1, maps.hidden_size),)
        )
        self.gate_source = maps.source

    def encode(self, activations: Activations) -> Tensor:
        """H_s (normalised if asked for), or every layer's projected K and V side by side."""
        features = self.maps.features(activations)
        if not self.stores_projected:
            return features
        parts = [part for layer in self.layers for part in self.maps.project(layer, features)]
        return torch.cat(parts, dim=-1)

    def decode(self, layer: int, code: Tensor) -> tuple[Tensor, Tensor]:
        """P_l of the stored H_s, or a slice of the stored keys and values."""
        if not self.stores_projected:
            return self.maps.project(layer, code)
        width, start = self.maps.kv_width, 2 * self.maps.kv_width * self.layers.index(layer)
        return code[..., start : start + width], code[..., start + width : start + 2 * width]

    def affine_keys(self, layer: int) -> AffineMap | None:
        """The layer's key matrix, where H_s is what is stored."""
        return self._affine(self.maps.keys, layer)

    def affine_values(self, layer: int) -> AffineMap | None:
        """The layer's value matrix, where H_s is what is stored."""
        return self._affine(self.maps.values, layer)

    def _affine(self, maps: nn.ModuleDict, layer: int) -> AffineMap | None:
        chosen = maps[str(layer)]
        assert isinstance(chosen, ResidualMap)
        return None if self.stores_projected else chosen.affine(self.code_width, 0)

    def holds(self, layer: int) -> bool:
        """Whether the projected keys and values are what is stored."""
        return self.stores_projected

    def problems(self) -> tuple[Problem, ...]:
        """Those of the projectors."""
        return self.maps.problems()
