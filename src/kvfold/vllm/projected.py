"""What recurrent states become over tokens that skip their layers, from vLLM's own weights.

The arithmetic is that of `kvfold.runtime.linear_states`. vLLM fuses the projections, divides heads
among devices and packs weights when all are loaded, so what is needed is taken just before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvfold.anatomy import LinearInputs
from kvfold.errors import AddOnError
from kvfold.methods import StateProjector
from kvfold.runtime.linear_states import StateScan
from kvfold.vllm.recurrent import RecurrentLayers
from kvfold.vllm.settings import Loaded


class ProjectedStates:
    """States of upper layers after skipped tokens: predicted, or nothing without a projector."""

    def __init__(self, recurrent: RecurrentLayers, loaded: Loaded) -> None:
        self.recurrent = recurrent
        self.replay = loaded.plan.replay
        self.projector: StateProjector | None = None
        if loaded.plan.state_projector:
            self.projector = loaded.addon.state_projector
        self.scans: dict[int, StateScan] = {}

    def weights_loaded(self) -> None:
        """Fold the maps into the layers' weights; raises `AddOnError` if that overflows."""
        if self.projector is None:
            return
        for index, module in self.recurrent.modules.items():
            scan = _scan(module, self.projector, index, self.replay)
            if scan is None:
                continue
            if not all(bool(torch.isfinite(part).all()) for part in (*scan.inputs, *scan.q_inputs)):
                raise AddOnError(
                    f"maps of the state projector must be finite; those of layer {index} are not, "
                    "in the model's dtype: the add-on is damaged, or the model must be served in "
                    "bfloat16 or float32"
                )
            self.scans[index] = scan

    def advance(self, context: Any, skipped: Mapping[int, Tensor]) -> None:
        """Let states go on over tokens that are left out.

        skipped: their hidden states at the split, (tokens, hidden), by request.
        """
        if self.projector is None:
            self.recurrent.clear(context, list(skipped))
            return
        for request, hidden in skipped.items():
            features = self.projector.features({self.projector.source: hidden[None]})
            for index in self.recurrent.modules:
                self._advance_one(context, request, index, features)

    def _advance_one(self, context: Any, request: int, index: int, features: Tensor) -> None:
        held, scan = self.recurrent.states(context, index, request), self.scans.get(index)
        if scan is None:
            held.clear()
            return
        valid = features.new_ones(features.shape[:2], dtype=torch.bool)
        convolved, state = held.read(scan.weights.conv_weight.shape[-1])
        held.write(*scan.advance(features, convolved, state, valid))


def _scan(module: Any, projector: StateProjector, index: int, replay: int) -> StateScan | None:
    """For the heads on this device."""
    weights = vllm_linear_inputs(module)
    first = module.tp_rank * weights.v_heads
    own = range(first, first + weights.v_heads)
    chosen = [head - first for head in projector.chosen_heads(index, replay) if head in own]
    return StateScan.of_weights(weights, projector, index, chosen)


def vllm_linear_inputs(module: Any) -> LinearInputs:
    """The weights of a vLLM Gated DeltaNet module on this device, copied where vLLM packs them."""
    k_heads, v_heads = module.num_k_heads // module.tp_size, module.num_v_heads // module.tp_size
    channels = 2 * k_heads * module.head_k_dim + v_heads * module.head_v_dim
    b_and_a = module.in_proj_ba.weight.detach()
    return LinearInputs(
        qkv_weight=module.in_proj_qkvz.weight.detach()[:channels],
        b_weight=b_and_a[:v_heads],
        a_weight=b_and_a[v_heads:],
        conv_weight=module.conv1d.weight.detach().squeeze(1).clone(),
        conv_bias=module.conv1d.bias,
        a_log=module.A_log.detach(),
        dt_bias=module.dt_bias.detach(),
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=module.head_k_dim,
        v_dim=module.head_v_dim,
    )
