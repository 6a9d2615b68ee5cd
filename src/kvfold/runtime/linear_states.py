"""Recurrent and convolution states of the linear-attention layers that a prompt may skip.

They are kept by transformers' own cache layers. A layer that has not run on some tokens has either
no state for them (as at the beginning of a text), or one that a state projector predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.anatomy import LinearInputs, linear_attention_module, linear_inputs
from kvfold.errors import CacheError
from kvfold.methods import AffineMap, StateProjector
from kvfold.methods.gated_delta import causal_conv, delta_state, log_decay
from kvfold.runtime.cache import FoldedCache


@dataclass(frozen=True)
class StateScan:
    """How one layer's state goes on over skipped tokens, for the heads that don't forget it.

    heads: value heads; head_of: the place of each one's key head among those that are read.
    channels: the convolution's channels of their keys, then of their values. inputs: from what the
    projector reads to those channels before the convolution, then beta's and the decay's inputs.
    q_channels, q_inputs: likewise of their queries, which only the first replayed tokens need.
    """

    layer: int
    weights: LinearInputs
    heads: Tensor
    head_of: Tensor
    channels: Tensor
    inputs: AffineMap
    q_channels: Tensor
    q_inputs: AffineMap

    @classmethod
    def of(cls, model: Any, projector: StateProjector, layer: int, replay: int) -> StateScan | None:
        """None if a replay of so many tokens leaves nothing of any head's state."""
        weights = linear_inputs(linear_attention_module(model, layer))
        return cls.of_weights(weights, projector, layer, projector.chosen_heads(layer, replay))

    @classmethod
    def of_weights(
        cls, weights: LinearInputs, projector: StateProjector, layer: int, chosen: Sequence[int]
    ) -> StateScan | None:
        """For chosen value heads of some weights; None without any."""
        if not chosen:
            return None
        read = sorted({weights.head_of[head] for head in chosen})
        k_start, v_start = weights.k_channels.start, weights.v_channels.start
        channels = [k_start + h * weights.k_dim + i for h in read for i in range(weights.k_dim)]
        queries = [h * weights.k_dim + i for h in read for i in range(weights.k_dim)]
        channels += [v_start + h * weights.v_dim + i for h in chosen for i in range(weights.v_dim)]
        device = weights.qkv_weight.device
        heads, places, q_places = (
            torch.tensor(x, device=device) for x in (chosen, channels, queries)
        )
        rows = (weights.qkv_weight[places], weights.b_weight[heads], weights.a_weight[heads])
        return cls(
            layer,
            weights,
            heads,
            torch.tensor([read.index(weights.head_of[head]) for head in chosen], device=device),
            places,
            projector.fold_rows(layer, torch.cat(rows)),
            q_places,
            projector.fold_rows(layer, weights.qkv_weight[q_places]),
        )

    def advance(
        self, features: Tensor, convolved: Tensor, state: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What convolution and state hold after some tokens, zeros where nothing is predicted.

        features: (batch, seq, hidden). convolved: (batch, channels, kernel) and state: (batch,
        v_heads, k_dim, v_dim), left as they are. valid: (batch, seq) bool, the tokens that count.
        """
        weights, count = self.weights, len(self.heads)
        made = functional.linear(features, *self.inputs)
        width = len(self.channels)
        mixed, beta, decay = made.tensor_split([width, width + count], dim=-1)
        mixed, kernel = self._convolve(mixed, convolved, self.channels, valid)
        keys, values = mixed.tensor_split([width - count * weights.v_dim], dim=-1)
        batch, seq = valid.shape
        scanned = delta_state(
            keys.reshape(batch, seq, -1, weights.k_dim),
            values.reshape(batch, seq, -1, weights.v_dim),
            log_decay(decay, weights.a_log[self.heads], weights.dt_bias[self.heads]),
            beta.float().sigmoid(),
            state[:, self.heads],
            head_of=self.head_of,
            valid=valid,
        )
        new_convolved, new_state = torch.zeros_like(convolved), torch.zeros_like(state)
        new_convolved[:, self.channels] = kernel.to(convolved.dtype)
        last = slice(-convolved.shape[-1], None)
        queries = functional.linear(features[:, last], *self.q_inputs)
        _, kernel = self._convolve(queries, convolved, self.q_channels, valid[:, last])
        new_convolved[:, self.q_channels] = kernel.to(convolved.dtype)
        new_state[:, self.heads] = scanned.to(state.dtype)
        return new_convolved, new_state

    def _convolve(
        self, x: Tensor, convolved: Tensor, channels: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        bias = None if self.weights.conv_bias is None else self.weights.conv_bias[channels]
        return causal_conv(
            x, convolved[:, channels], self.weights.conv_weight[channels], bias, valid
        )


class SkippedStates:
    """How an attached model's skipped linear-attention layers get their states.

    layers: those from the split on. projector: of an add-on, or None for states of nothing.
    """

    def __init__(
        self, model: Any, layers: Sequence[int], projector: StateProjector | None, replay: int
    ) -> None:
        self.model = model
        self.layers = list(layers)
        self.projector = projector
        self.scans: dict[int, StateScan] = {}
        self._finite: list[Tensor] = []
        if projector is None:
            return
        for layer in self.layers:
            scan = StateScan.of(model, projector, layer, replay)
            if scan is not None:
                self.scans[layer] = scan

    def _tensors(self, cache: FoldedCache) -> list[Tensor]:
        """Every state that exists, (batch, ...) each."""
        held = [
            state
            for index in self.layers
            for states in (cache.layers[index].conv_states, cache.layers[index].recurrent_states)
            for state in states.values()
        ]
        return [state for state in held if state is not None]

    def of(self, cache: FoldedCache, rows: Sequence[bool]) -> list[Tensor]:
        """Copies of some rows' states; none where no state exists yet."""
        chosen = torch.tensor(rows)
        if not bool(chosen.any()):
            return []
        return [state[chosen.to(state.device)].clone() for state in self._tensors(cache)]

    def restore(self, cache: FoldedCache, rows: Sequence[bool], kept: list[Tensor]) -> None:
        """Put copies from `of` back; where there were none, as at the beginning of a text."""
        if not kept:
            self.clear(cache, rows)
            return
        chosen = torch.tensor(rows)
        for state, copy in zip(self._tensors(cache), kept, strict=True):
            state[chosen.to(state.device)] = copy

    def clear(self, cache: FoldedCache, rows: Sequence[bool]) -> None:
        """Let some rows' states be as at the beginning of a text."""
        chosen = torch.tensor(rows)
        for state in self._tensors(cache) if bool(chosen.any()) else ():
            state[chosen.to(state.device)] = 0

    def advance(self, cache: FoldedCache, hidden: Tensor, valid: Tensor) -> None:
        """Go on over tokens that skip the layers; rows without one are left as they are.

        hidden: H_s, (batch, seq, hidden). valid: (batch, seq) bool, which of them count.
        """
        rows = valid.any(dim=1)
        if self.projector is None or not bool(rows.any()):
            self.clear(cache, rows.tolist())
            return
        features = self.projector.features({self.projector.source: hidden})
        for index in self.layers:
            layer = cache.layers[index]
            self._initialise(layer, index, hidden)
            convolved, state = layer.conv_states[0], layer.recurrent_states[0]
            scan = self.scans.get(index)
            if scan is None:
                made = (torch.zeros_like(convolved), torch.zeros_like(state))
            else:
                made = scan.advance(features, convolved, state, valid)
                self._finite += [torch.isfinite(part).all() for part in made]
            for held, new in zip((convolved, state), made, strict=True):
                held.copy_(torch.where(rows.view(-1, *[1] * (held.dim() - 1)), new, held))

    def require_finite(self) -> None:
        """Raise `CacheError` if a state that was predicted since the last call is not finite."""
        flags, self._finite = self._finite, []
        if flags and not bool(torch.stack(flags).all()):
            raise CacheError(
                "recurrent states must be finite; those that the state projector predicts for "
                f"layers {sorted(self.scans)} are not: the add-on is damaged or its maps overflow "
                "the model's dtype; load the model in bfloat16 or float32, or fit again"
            )

    def _initialise(self, layer: Any, index: int, like: Tensor) -> None:
        """Allocate states of nothing where there are none, as transformers would."""
        if layer.has_previous_state[0]:
            return
        weights = linear_inputs(linear_attention_module(self.model, index))
        channels, kernel = weights.conv_weight.shape
        shape = (like.shape[0], weights.v_heads, weights.k_dim, weights.v_dim)
        layer.lazy_initialization(conv_states=like.new_zeros(like.shape[0], channels, kernel))
        layer.lazy_initialization(recurrent_states=like.new_zeros(shape, dtype=torch.float32))
        layer.has_previous_state[0] = True
