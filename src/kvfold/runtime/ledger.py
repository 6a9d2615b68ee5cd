"""Bytes by component: counted on a real cache, or predicted from a plan.

Components: anchors and window (exact keys and values), slots (history: expanded keys and values,
or stored codes and rotary parts), scales (k_norm scales of absorbed keys), pending (codes of
tokens still in the window), unused (room that buffers have grown ahead), plain (layers that are
not folded, whole or sliding) and recurrent (states of linear-attention layers).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.anatomy import Anatomy, LayerAnatomy
from kvfold.methods import DepthMethod, build_methods
from kvfold.plan import Plan
from kvfold.runtime.buffers import rounded
from kvfold.runtime.layer import Reading
from kvfold.runtime.reading import choose_readings
from kvfold.runtime.schedule import Schedule

if TYPE_CHECKING:
    from kvfold.runtime.cache import FoldedCache

COMPONENTS = (
    "anchors",
    "window",
    "slots",
    "scales",
    "pending",
    "unused",
    "plain",
    "recurrent",
)


@dataclass(frozen=True)
class Ledger:
    """Bytes of each component."""

    components: dict[str, int]

    @property
    def total(self) -> int:
        """All components together."""
        return sum(self.components.values())

    def __getitem__(self, component: str) -> int:
        return self.components[component]

    @classmethod
    def of_cache(cls, cache: FoldedCache) -> Ledger:
        """Count a cache's storages."""
        counted = dict.fromkeys(COMPONENTS, 0)
        slots = max((cache.schedule.slots(seen) for seen in cache.rows), default=0)
        for index, layer in enumerate(cache.layers):
            if index in cache.folded:
                _count_layer(counted, cache, index, slots)
            else:
                _count_plain(counted, layer)
        after_anchors = max((seen - cache.schedule.anchors for seen in cache.rows), default=0)
        for store in cache.stores.values():
            if store.codes is not None:
                used = max(0, after_anchors) if store.keep else store.codes.shape[2]
                history = slots if store.keep else 0
                _split(counted, store.codes, slots=history, pending=used - history)
        return cls(counted)


def _split(counted: dict[str, int], tensor: Tensor, **places: int) -> None:
    """Count a (batch, heads, places, width) tensor's storage: so many places of each component."""
    total = tensor.untyped_storage().nbytes()
    each = total // tensor.shape[2] if tensor.shape[2] else 0
    for component, count in places.items():
        counted[component] += count * each
        total -= count * each
    counted["unused"] += total


def _count_layer(counted: dict[str, int], cache: FoldedCache, index: int, slots: int) -> None:
    schedule = cache.schedule
    owned = cache.folded_layer(index).tensors()
    expanded = cache.folded_layer(index).fold.reading == "expanded"
    for name, tensor in owned.items():
        if name in ("keys", "values"):
            shown = slots if expanded else 0
            _split(
                counted,
                tensor,
                anchors=schedule.anchors,
                window=schedule.ring_size,
                slots=shown,
            )
        else:
            component = "scales" if name == "rho" else "slots"
            _split(counted, tensor, **{component: slots})


def _count_plain(counted: dict[str, int], layer: Any) -> None:
    states = [*_tensors(getattr(layer, "conv_states", None))]
    states += _tensors(getattr(layer, "recurrent_states", None))
    counted["recurrent"] += sum(t.untyped_storage().nbytes() for t in states)
    kept = [*_tensors(getattr(layer, "keys", None)), *_tensors(getattr(layer, "values", None))]
    counted["plain"] += sum(t.untyped_storage().nbytes() for t in kept)


def _tensors(held: Any) -> Iterable[Tensor]:
    """The tensors of an attribute that is a tensor, a dict of them, or nothing."""
    if isinstance(held, Tensor):
        return [held]
    return [t for t in held.values() if t is not None] if isinstance(held, dict) else []


def plain_bytes(anatomy: Anatomy, tokens: int, *, batch: int = 1, element_size: int = 2) -> Ledger:
    """What the model's own cache holds after so many tokens a row."""
    counted = dict.fromkeys(COMPONENTS, 0)
    for layer in anatomy.layers:
        _predict_plain(counted, layer, tokens, batch, element_size)
    return Ledger(counted)


def predict_bytes(
    plan: Plan,
    anatomy: Anatomy,
    tokens: int,
    *,
    batch: int = 1,
    element_size: int = 2,
) -> Ledger:
    """What a folded cache will hold after so many tokens a row, to the byte.

    element_size: bytes of a value in the model's dtype. `resident: auto` is taken as with plenty
    of memory. Raises `PlanError` if the plan does not fit.
    """
    with torch.device("meta"):
        methods: list[Any] = list(build_methods(plan, anatomy))
    readings = choose_readings(plan, methods, anatomy, element_size=element_size)
    schedule = Schedule(plan.anchors, plan.window)
    counted = dict.fromkeys(COMPONENTS, 0)
    for layer in anatomy.layers:
        if layer.index not in readings:
            _predict_plain(counted, layer, tokens, batch, element_size)
    unit = batch * element_size
    for method in methods:
        for index in method.layers:
            layer = anatomy.layers[index]
            _predict_layer(counted, layer, method, readings[index], schedule, tokens, unit)
        _predict_codes(counted, method, readings, schedule, tokens, unit)
    return Ledger(counted)


def _predict_plain(
    counted: dict[str, int], layer: LayerAnatomy, tokens: int, batch: int, element_size: int
) -> None:
    kept = tokens if layer.sliding_window is None else min(tokens, layer.sliding_window - 1)
    counted["plain"] += 2 * layer.kv_width * kept * batch * element_size
    counted["recurrent"] += batch * (
        4 * layer.state_values + element_size * layer.convolution_values
    )


def _predict_layer(
    counted: dict[str, int],
    layer: LayerAnatomy,
    method: DepthMethod,
    reading: Reading,
    schedule: Schedule,
    tokens: int,
    unit: int,
) -> None:
    slots = schedule.slots(tokens)
    token = 2 * layer.kv_width * unit
    counted["anchors"] += schedule.anchors * token
    counted["window"] += schedule.ring_size * token
    spare = rounded(slots) - slots
    if reading == "expanded":
        counted["slots"] += slots * token
        counted["unused"] += spare * token
    absorbs_keys = (
        reading == "absorbed"
        and layer.rotary_dim < layer.head_dim
        and method.affine_keys(layer.index) is not None
    )
    if absorbs_keys:
        rotary = layer.kv_heads * layer.rotary_dim * unit
        scales = layer.kv_heads * unit if layer.k_norm != "none" else 0
        counted["slots"] += slots * rotary
        counted["scales"] += slots * scales
        counted["unused"] += spare * (rotary + scales)


def _predict_codes(
    counted: dict[str, int],
    method: DepthMethod,
    readings: dict[int, Reading],
    schedule: Schedule,
    tokens: int,
    unit: int,
) -> None:
    code = method.code_width * unit
    if not any(readings[layer] in ("shared", "absorbed") for layer in method.layers):
        counted["pending"] += schedule.ring_size * code
        return
    slots, kept = schedule.slots(tokens), max(0, tokens - schedule.anchors)
    counted["slots"] += slots * code
    counted["pending"] += (kept - slots) * code
    counted["unused"] += (rounded(kept) - kept) * code
