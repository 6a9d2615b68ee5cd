"""Bytes by component: counted on a real cache, or predicted from a plan.

Components: anchors and window (exact keys and values), slots (history: expanded keys and values,
or stored codes and rotary parts), scales (of quantised slots, and k_norm scales of absorbed keys),
pending (slots of tokens still in the window, and tokens of an unfinished group), unused (room that
buffers have grown ahead), plain (layers that are not folded, whole or sliding) and recurrent
(states of linear-attention layers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.anatomy import Anatomy, LayerAnatomy
from kvfold.methods import Pipeline, build_pipelines
from kvfold.methods.turboquant import SCALE_BYTES
from kvfold.plan import Plan
from kvfold.runtime.buffers import rounded
from kvfold.runtime.codes import CodeStore, code_store_needs
from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.layer import FoldedAttention
from kvfold.runtime.reading import choose_readings
from kvfold.runtime.schedule import Schedule
from kvfold.runtime.slots import SlotStore

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

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

SLIDING_BYTES = torch.long.itemsize
"""A sliding layer of transformers holds its window's size as a tensor too."""


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
    def of_plain(cls, cache: Cache) -> Ledger:
        """Count the storages of transformers' own cache."""
        counted = dict.fromkeys(COMPONENTS, 0)
        for layer in cache.layers:
            _count_plain(counted, layer)
        return cls(counted)

    @classmethod
    def of_cache(cls, cache: FoldedCache) -> Ledger:
        """Count a cache's storages."""
        counted = dict.fromkeys(COMPONENTS, 0)
        for index, layer in enumerate(cache.layers):
            if index in cache.folded:
                _count_layer(counted, cache.folded_layer(index), cache.rows)
            else:
                _count_plain(counted, layer)
        for store in cache.stores.values():
            for waiting in (store.partial, store.pending):
                if waiting is not None:
                    counted["pending"] += waiting.untyped_storage().nbytes()
            for part in store.slots.stores:
                _count_slots(counted, part, store.schedule, cache.rows)
        return cls(counted)


def _split(counted: dict[str, int], tensor: Tensor, **places: int) -> None:
    """Count a (batch, heads, places, width) tensor's storage: so many places of each component."""
    total = tensor.untyped_storage().nbytes()
    each = total // tensor.shape[2] if tensor.shape[2] else 0
    for component, count in places.items():
        counted[component] += count * each
        total -= count * each
    counted["unused"] += total


def _visible_and_waiting(schedule: Schedule, rows: Sequence[int]) -> tuple[int, int]:
    """Slots of the longest row that queries see, and those that are made but not visible yet."""
    visible = max((schedule.slots(seen) for seen in rows), default=0)
    return visible, max((schedule.made(seen) for seen in rows), default=0) - visible


def _count_layer(counted: dict[str, int], layer: FoldedLayer, rows: Sequence[int]) -> None:
    schedule, fold = layer.schedule, layer.fold
    visible, waiting = _visible_and_waiting(schedule, rows)
    inside = fold.reading == "expanded" and "slot_keys" not in layer.stores
    if layer.is_initialized:
        anchors = min(schedule.anchors, layer.exact_places)
        for tensor in (layer.keys, layer.values):
            _split(
                counted,
                tensor,
                anchors=anchors,
                window=layer.exact_places - anchors,
                slots=visible if inside else 0,
                pending=waiting if inside and fold.expands_early else 0,
            )
    for name, store in layer.stores.items():
        _count_slots(counted, store, schedule, rows, "scales" if name == "rho" else "slots")


def _count_slots(
    counted: dict[str, int],
    store: SlotStore,
    schedule: Schedule,
    rows: Sequence[int],
    component: str = "slots",
) -> None:
    visible, waiting = _visible_and_waiting(schedule, rows)
    for name, tensor in store.tensors().items():
        held = "scales" if name == "scales" else component
        _split(counted, tensor, **{held: visible, "pending": waiting})


def _count_plain(counted: dict[str, int], layer: Any) -> None:
    for name, held in vars(layer).items():
        component = "recurrent" if name in ("conv_states", "recurrent_states") else "plain"
        counted[component] += sum(t.untyped_storage().nbytes() for t in _tensors(held))


def _tensors(held: Any) -> Iterable[Tensor]:
    """The tensors of an attribute that is a tensor, a dict of them, or something else."""
    if isinstance(held, Tensor):
        return [held]
    return [t for t in held.values() if isinstance(t, Tensor)] if isinstance(held, dict) else []


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
        pipelines: list[Any] = list(build_pipelines(plan, anatomy))
    readings = choose_readings(plan, pipelines, anatomy, element_size=element_size)
    counted = dict.fromkeys(COMPONENTS, 0)
    for layer in anatomy.layers:
        if layer.index not in readings:
            _predict_plain(counted, layer, tokens, batch, element_size)
    for pipeline in pipelines:
        schedule = Schedule(plan.anchors, plan.window, pipeline.group)
        rows = _Rows(schedule, tokens, batch, element_size)
        folds = [
            FoldedAttention(
                index, None, anatomy.family, anatomy.layers[index], pipeline, readings[index]
            )
            for index in pipeline.layers
        ]
        for fold in folds:
            _predict_layer(counted, fold, rows)
        _predict_codes(counted, pipeline, folds, rows)
    return Ledger(counted)


@dataclass(frozen=True)
class _Rows:
    """`batch` rows of `tokens` each, `element_size` bytes a value."""

    schedule: Schedule
    tokens: int
    batch: int
    element_size: int

    @property
    def visible(self) -> int:
        return self.schedule.slots(self.tokens)

    @property
    def waiting(self) -> int:
        return self.schedule.made(self.tokens) - self.visible

    def add_slots(
        self, counted: dict[str, int], component: str, each: int, *, early: bool = True
    ) -> None:
        """Count a growing buffer of slots of `each` bytes in a row."""
        waiting = self.waiting if early else 0
        used = self.visible + waiting
        counted[component] += self.batch * self.visible * each
        counted["pending"] += self.batch * waiting * each
        counted["unused"] += self.batch * (rounded(used) - used) * each


def _predict_plain(
    counted: dict[str, int], layer: LayerAnatomy, tokens: int, batch: int, element_size: int
) -> None:
    kept = tokens
    if layer.sliding_window is not None:
        kept = min(tokens, layer.sliding_window - 1)
        counted["plain"] += SLIDING_BYTES
    counted["plain"] += 2 * layer.kv_width * kept * batch * element_size
    counted["recurrent"] += batch * (
        4 * layer.state_values + element_size * layer.convolution_values
    )


def _predict_layer(counted: dict[str, int], fold: FoldedAttention, rows: _Rows) -> None:
    layer, schedule = fold.anatomy, rows.schedule
    token = 2 * layer.kv_width * rows.element_size
    exact = schedule.exact_places(rows.tokens)
    anchors = min(schedule.anchors, exact)
    counted["anchors"] += rows.batch * anchors * token
    counted["window"] += rows.batch * (exact - anchors) * token
    stores = FoldedLayer(fold, schedule).stores
    if fold.reading == "expanded" and not stores:
        rows.add_slots(counted, "slots", token, early=fold.expands_early)
    widths = {"rotary": layer.rotary_dim, "rho": 1}
    for name, store in stores.items():
        component = "scales" if name == "rho" else "slots"
        width = widths.get(name, layer.head_dim)
        _add_store(counted, rows, store, layer.kv_heads, width, component)


def _add_store(
    counted: dict[str, int],
    rows: _Rows,
    store: SlotStore,
    heads: int,
    width: int,
    component: str = "slots",
) -> None:
    if store.codec is None:
        rows.add_slots(counted, component, heads * width * rows.element_size)
        return
    rows.add_slots(counted, component, heads * store.codec.row_bytes)
    rows.add_slots(counted, "scales", heads * SCALE_BYTES)


def _predict_codes(
    counted: dict[str, int], pipeline: Pipeline, folds: list[FoldedAttention], rows: _Rows
) -> None:
    if pipeline.depth.code_width == 0 or rows.tokens == 0:
        return
    keep, late = code_store_needs(folds)
    store = CodeStore(pipeline, rows.schedule, keep=keep, late=late)
    record = rows.batch * pipeline.record_width * rows.element_size
    counted["pending"] += store.partial_size * record
    if store.late:
        waiting = rows.schedule.pending_places(rows.tokens) * pipeline.depth.code_width
        counted["pending"] += rows.batch * waiting * rows.element_size
    if keep and store.slots.parts:
        for part, held in zip(store.slots.parts, store.slots.stores, strict=True):
            _add_store(counted, rows, held, part.heads, part.width)
    elif keep:
        _add_store(counted, rows, store.slots.stores[0], 1, pipeline.depth.code_width)
