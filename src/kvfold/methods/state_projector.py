"""From one early hidden state to what the states of upper linear-attention layers are made of.

Where prefill skips the upper layers, a Gated DeltaNet layer l has no input x_l for most of the
prompt, and so no state. The projector predicts it, as CED predicts keys and values, by

    x_l = W_l rms_normalize(H_s) + c_l

with x_l what the layer's input projections read (after its input norm) and H_s the output of the
first s layers. Keys, values, beta and decay then follow by the layer's own frozen weights: with
R their rows, `R x_l = (R W_l) rms_normalize(H_s) + R c_l`, one matrix product a token, and its own
convolution and gates behind. Least squares commutes with linear maps, so W_l fitted on x_l gives
the same as a map fitted on each of them, with fewer weights.

A gated state forgets: of what a head held, the share `exp(sum of g)` is left when the replayed
tokens have run, and where that is next to nothing the head need not be scanned at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kvfold.methods.base import Activations, AffineMap, Problem, Regression, Source
from kvfold.methods.maps import rms_normalize

KEPT_SHARE = 1e-3
"""Heads that keep less of a state than this are not scanned.

Leaving one out changes its state, when the replay is over, by at most this share of what the
skipped tokens had made of it: less than the rounding of bfloat16 (2e-3). The delta rule erases
besides, so the real change is smaller.
"""


class StateProjector(nn.Module):
    """The map W_l, c_l of each upper linear-attention layer.

    split: s. layers: the linear-attention layers served. hidden_size: of H_s and of each x_l.
    v_heads: states of each layer. Maps start at zero. measured_replay, kept: the share of a state
    that was left after so many tokens, by layer and head; until something is measured, all.
    """

    def __init__(self, split: int, layers: tuple[int, ...], hidden_size: int, v_heads: int) -> None:
        super().__init__()
        self.source = Source("hidden", split)
        self.layers = layers
        self.hidden_size = hidden_size
        self.v_heads = v_heads
        self.maps = nn.ModuleDict()
        for layer in layers:
            linear = nn.Linear(hidden_size, hidden_size)
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
            self.maps[str(layer)] = linear
        self.measured_replay = 1
        self.kept: dict[int, tuple[float, ...]] = dict.fromkeys(layers, (1.0,) * v_heads)

    def features(self, activations: Activations) -> Tensor:
        """What the maps read: `rms_normalize(H_s)`, (batch, seq, hidden)."""
        return rms_normalize(activations[self.source])

    def project(self, layer: int, features: Tensor) -> Tensor:
        """x_l of the features: (batch, seq, hidden) to (batch, seq, hidden)."""
        projected: Tensor = self._linear(layer)(features)
        return projected

    def fold_rows(self, layer: int, rows: Tensor) -> AffineMap:
        """The layer's map with rows of its input projections folded in: `R W_l`, `R c_l`.

        rows: (outputs, hidden), R. Products are taken in float32 (float64 for float64 rows); the
        result has the dtype of the rows.
        """
        linear = self._linear(layer)
        work = torch.float64 if rows.dtype == torch.float64 else torch.float32
        weight, bias = (part.to(work) for part in (linear.weight, linear.bias))
        wide = rows.to(work)
        return AffineMap((wide @ weight).to(rows.dtype), (wide @ bias).to(rows.dtype))

    def set_kept(self, replay: int, kept: Mapping[int, Sequence[float]]) -> None:
        """Take what was measured: per layer and head, the share left after `replay` tokens.

        Raises `ValueError` unless there is a share from 0 to 1 for every head, and a token.
        """
        shares = {layer: tuple(float(share) for share in kept[layer]) for layer in self.layers}
        lengths = {len(own) for own in shares.values()}
        inside = all(0 <= share <= 1 for own in shares.values() for share in own)
        if not isinstance(replay, int) or replay < 1 or lengths != {self.v_heads} or not inside:
            raise ValueError(
                f"there must be a share from 0 to 1 for each of {self.v_heads} heads after at "
                f"least 1 token; got {shares} after {replay}"
            )
        self.measured_replay, self.kept = replay, shares

    def chosen_heads(
        self, layer: int, replay: int, threshold: float = KEPT_SHARE
    ) -> tuple[int, ...]:
        """The value heads whose states matter after `replay` more tokens.

        Their share `kept ** (replay / measured_replay)` is above the threshold: decay is taken to
        go on at the pace that was measured. Shares are means over positions, so for a longer
        replay than was measured this is too low rather than too high.
        """
        pace = replay / self.measured_replay
        shares = self.kept[layer]
        return tuple(head for head, share in enumerate(shares) if share**pace > threshold)

    def problems(self) -> tuple[Problem, ...]:
        """Each map regresses its layer's input on the features."""
        key = f"state projector H_{self.source.layer}"
        made = []
        for layer in self.layers:
            target, linear = Source("inputs", layer), self._linear(layer)
            made.append(Regression(0, key, self.features, (self.source,), target, linear))
        return tuple(made)

    def _linear(self, layer: int) -> nn.Linear:
        linear = self.maps[str(layer)]
        assert isinstance(linear, nn.Linear)
        return linear
