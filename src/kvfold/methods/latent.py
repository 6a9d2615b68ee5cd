"""Latent: one code of a few values a token for a whole group of layers.

`z = E x`, `K_l = D_l^K z + b`, `V_l = D_l^V z + b`. With x the group's own stacked [K; V] the
closed form is principal components; with x = H_s it is reduced-rank regression, and prefill can
later be skipped. The rank is the byte dial. Keys of models with a k_norm enter the code divided
by their root mean square, since only their direction matters after the norm.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from kvfold.methods.base import (
    Activations,
    AffineMap,
    CodePart,
    Components,
    DepthMethod,
    Problem,
    Source,
)
from kvfold.methods.maps import affine_bias, rms_normalize


def unit_rms_heads(keys: Tensor, head_dim: int) -> Tensor:
    """Keys with each head divided by its root mean square; (batch, seq, kv_heads * head_dim)."""
    heads = keys.view(*keys.shape[:-1], -1, head_dim)
    return rms_normalize(heads).view(keys.shape)


class LatentFold(DepthMethod):
    """A latent code for a group of layers.

    layers: the group. kv_width, head_dim: of each. rank: values of the code. value_rank: if
    given, values get a code of their own and `rank` is the keys'. split, hidden_size: draw the
    code from H_split instead of the group's own keys and values. unit_keys: divide each key head
    by its root mean square before encoding (models with a k_norm).
    """

    name = "latent"

    def __init__(
        self,
        layers: tuple[int, ...],
        kv_width: int,
        head_dim: int,
        rank: int,
        *,
        value_rank: int | None = None,
        split: int | None = None,
        hidden_size: int = 0,
        unit_keys: bool = False,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.head_dim = head_dim
        self.unit_keys = unit_keys
        self.targets = tuple(
            Source("keys" if kind == "keys" else "values", layer)
            for kind in ("keys", "values")
            for layer in layers
        )
        self.key_rank = rank
        self.joint = value_rank is None
        self.code_parts = (
            (CodePart("both", 1, rank),)
            if value_rank is None
            else (CodePart("keys", 1, rank), CodePart("values", 1, value_rank))
        )
        self.gate_source = (
            Source("inputs", max(layers)) if split is None else Source("hidden", split)
        )
        self.needs_window = split is None
        self.inputs = self.targets if split is None else (Source("hidden", split),)
        group = len(layers) * kv_width
        if split is not None:
            key_in = value_in = hidden_size
        elif self.joint:
            key_in = 2 * group
        else:
            key_in = value_in = group
        self.encoder = _zero_linear(key_in, rank, bias=False)
        self.value_encoder = (
            None if value_rank is None else _zero_linear(value_in, value_rank, bias=False)
        )
        self.keys = nn.ModuleDict({str(n): _zero_linear(rank, kv_width) for n in layers})
        self.values = nn.ModuleDict(
            {str(n): _zero_linear(value_rank or rank, kv_width) for n in layers}
        )

    def encoder_input(self, sources: tuple[Source, ...], activations: Activations) -> Tensor:
        """The named activations side by side, as the encoder reads them.

        A hidden state is divided by its root mean square, as CED does: some of its values are
        hundreds of times larger than the others at single tokens.
        """
        parts = []
        for source in sources:
            x = activations[source]
            if source.kind == "hidden":
                x = rms_normalize(x)
            elif self.unit_keys and source.kind == "keys":
                x = unit_rms_heads(x, self.head_dim)
            parts.append(x)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def encode(self, activations: Activations) -> Tensor:
        """z = E x: (batch, seq, code_width)."""
        if self.value_encoder is None:
            z: Tensor = self.encoder(self.encoder_input(self.inputs, activations))
            return z
        key_inputs, value_inputs = self._split_inputs()
        keys = self.encoder(self.encoder_input(key_inputs, activations))
        values = self.value_encoder(self.encoder_input(value_inputs, activations))
        return torch.cat([keys, values], dim=-1)

    def decode(self, layer: int, code: Tensor) -> tuple[Tensor, Tensor]:
        """D_l z, each (batch, seq, kv_width)."""
        name = str(layer)
        value_code = code if self.joint else code[..., self.key_rank :]
        return self.keys[name](code[..., : self.key_rank]), self.values[name](value_code)

    def affine_keys(self, layer: int) -> AffineMap | None:
        """The layer's key decoder, padded with zeros over the values' code."""
        return self._affine(self.keys, layer, 0)

    def affine_values(self, layer: int) -> AffineMap | None:
        """The layer's value decoder, padded with zeros over the keys' code."""
        return self._affine(self.values, layer, 0 if self.joint else self.key_rank)

    def _affine(self, decoders: nn.ModuleDict, layer: int, start: int) -> AffineMap:
        linear = decoders[str(layer)]
        assert isinstance(linear, nn.Linear)
        weight = linear.weight
        if weight.shape[1] != self.code_width:
            full = weight.new_zeros(weight.shape[0], self.code_width)
            full[:, start : start + weight.shape[1]] = weight
            weight = full
        return AffineMap(weight, affine_bias(linear))

    def _split_inputs(self) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
        if self.inputs is not self.targets:
            return self.inputs, self.inputs
        half = len(self.targets) // 2
        return self.targets[:half], self.targets[half:]

    def problems(self) -> tuple[Problem, ...]:
        """One code for keys and values together, or one for each."""
        half = len(self.targets) // 2
        key_targets, value_targets = self.targets[:half], self.targets[half:]
        keys = {s: self.keys[str(s.layer)] for s in key_targets}
        values = {s: self.values[str(s.layer)] for s in value_targets}
        if self.value_encoder is None:
            decoders = {**keys, **values}
            return (self._components(self.inputs, self.targets, self.encoder, decoders),)
        key_inputs, value_inputs = self._split_inputs()
        return (
            self._components(key_inputs, key_targets, self.encoder, keys),
            self._components(value_inputs, value_targets, self.value_encoder, values),
        )

    def _components(
        self,
        inputs: tuple[Source, ...],
        targets: tuple[Source, ...],
        encoder: nn.Linear,
        decoders: dict[Source, nn.Module],
    ) -> Components:
        linears = {s: module for s, module in decoders.items() if isinstance(module, nn.Linear)}
        features = partial(self.encoder_input, inputs)
        return Components(0, features, inputs, targets, encoder, linears)


def _zero_linear(in_width: int, out_width: int, *, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(in_width, out_width, bias=bias)
    nn.init.zeros_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
