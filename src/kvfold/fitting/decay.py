"""How fast the states of linear-attention layers forget, head by head.

A Gated DeltaNet head multiplies its state by exp(g_t) at token t, with `g_t = -exp(A) *
softplus(a_t + dt_bias)`. Of a state the share

    kept(T) = mean over positions of exp(sum of g over T tokens)

is left T tokens later; the delta rule overwrites besides, so this is an upper bound. It says which
heads a replay of T tokens warms up by itself, and which need a state from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.anatomy import Anatomy, anatomy, linear_attention_module, linear_inputs
from kvfold.errors import EvaluationError, UnsupportedModelError
from kvfold.methods import Source, StateProjector
from kvfold.methods.gated_delta import log_decay
from kvfold.plan import Plan
from kvfold.runtime.capture import capture

REPLAYS = (64, 128, 256, 512, 1024)
KEPT_WINDOWS = 8
"""Windows of a fit's text on which it measures what a replay leaves of each state."""
TOKENS_PER_BATCH = 1024
"""Tokens of one forward: the inputs of every linear-attention layer are held for so many."""


@dataclass(frozen=True)
class LayerDecay:
    """One layer; every tuple has a value for each value head.

    log_decay: mean of g, per token, at most 0. kept: by tokens T, the mean share of a state that
    is left after them.
    """

    layer: int
    log_decay: tuple[float, ...]
    kept: Mapping[int, tuple[float, ...]]

    @property
    def half_life(self) -> tuple[float, ...]:
        """Tokens until half of a state is left at the mean decay; infinite without decay."""
        return tuple(math.log(2) / -g if g < 0 else math.inf for g in self.log_decay)


@dataclass(frozen=True)
class DecayReport:
    """All linear-attention layers of a model, and the text they were measured on."""

    windows: int
    window: int
    layers: tuple[LayerDecay, ...]

    @property
    def replays(self) -> tuple[int, ...]:
        """The numbers of tokens T that `kept` is known for, in order."""
        return tuple(self.layers[0].kept)

    def to_dict(self) -> dict[str, Any]:
        """Every head as plain data for JSON; a half-life without end is None."""
        return {
            "windows": self.windows,
            "window": self.window,
            "layers": [
                {
                    "layer": decay.layer,
                    "heads": [
                        {
                            "log_decay": decay.log_decay[head],
                            "half_life": life if math.isfinite(life) else None,
                            "kept": {str(t): shares[head] for t, shares in decay.kept.items()},
                        }
                        for head, life in enumerate(decay.half_life)
                    ],
                }
                for decay in self.layers
            ],
        }


@torch.no_grad()
def measure_decay(
    model: Any, windows: Tensor, replays: Sequence[int] = REPLAYS, *, batch: int | None = None
) -> DecayReport:
    """Measure every linear-attention layer of the plain model on some text.

    windows: (windows, seq) ids without padding. replays: the T of `kept`; those longer than a
    window are left out. batch: windows in one forward. Raises `UnsupportedModelError` for a model
    without such layers, `EvaluationError` for no tokens or a T below 1.
    """
    shape = anatomy(model)
    layers = linear_layers(shape)
    if windows.ndim != 2 or windows.numel() == 0 or min(replays, default=1) < 1:
        raise EvaluationError(
            "decay needs token windows of shape (windows, seq) with at least one token, and "
            f"replays of at least 1 token; got {tuple(windows.shape)} and {list(replays)}"
        )
    seq = windows.shape[1]
    fitting = sorted({replay for replay in replays if replay <= seq})
    batch = batch or max(1, TOKENS_PER_BATCH // seq)
    sums = dict.fromkeys(layers, torch.zeros((), dtype=torch.float64))
    for ids in torch.split(windows, batch):
        inputs = capture(model, shape, {Source("inputs", layer) for layer in layers}, ids)
        for layer in layers:
            g = _log_decays(model, layer, inputs[Source("inputs", layer)])
            sums[layer] = sums[layer] + _window_means(g, fitting).sum(0).cpu()
    return DecayReport(
        len(windows),
        seq,
        tuple(_layer_decay(layer, sums[layer] / len(windows), fitting) for layer in layers),
    )


def set_kept(
    model: Any, plan: Plan, projector: StateProjector | None, tokens: Tensor
) -> dict[str, Any]:
    """Measure how much of each skipped state a replay leaves, for the choice of heads."""
    if projector is None:
        return {}
    replay = min(plan.replay, tokens.shape[1])
    decay = measure_decay(model, tokens[:KEPT_WINDOWS], (replay,))
    kept = {layer.layer: layer.kept[replay] for layer in decay.layers}
    projector.set_kept(replay, {layer: kept[layer] for layer in projector.layers})
    chosen = {
        str(layer): len(projector.chosen_heads(layer, plan.replay)) for layer in projector.layers
    }
    return {"state_projector": {"heads": projector.v_heads, "scanned": chosen}}


def linear_layers(shape: Anatomy) -> tuple[int, ...]:
    """The linear-attention layers; raises `UnsupportedModelError` for a model without any."""
    layers = tuple(layer.index for layer in shape.layers if layer.kind == "linear_attention")
    if not layers:
        raise UnsupportedModelError(
            "decay is measured in linear-attention layers; this model "
            f"({shape.family.name}) has no linear-attention layers, so nothing in it decays; "
            "measure a hybrid model"
        )
    return layers


def _log_decays(model: Any, layer: int, inputs: Tensor) -> Tensor:
    """g of each token and head: (batch, seq, v_heads)."""
    weights = linear_inputs(linear_attention_module(model, layer))
    return log_decay(inputs @ weights.a_weight.T, weights.a_log, weights.dt_bias)


def _window_means(g: Tensor, replays: Sequence[int]) -> Tensor:
    """Per window the mean of g, then the mean shares: (batch, 1 + replays, v_heads), float64."""
    total = torch.nn.functional.pad(g.double().cumsum(1), (0, 0, 1, 0))
    shares = [(total[:, t:] - total[:, :-t]).exp().mean(1) for t in replays]
    return torch.stack([g.double().mean(1), *shares], dim=1)


def _layer_decay(layer: int, means: Tensor, replays: Sequence[int]) -> LayerDecay:
    log_decays, *shares = (tuple(row) for row in means.tolist())
    return LayerDecay(layer, log_decays, dict(zip(replays, shares, strict=True)))
