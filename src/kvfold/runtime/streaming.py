"""Attention that reads slots block by block, with an online softmax.

What a layer has in place of expanded slots is turned into logits and weighted sums one block at a
time, so the whole history never exists in floats at once: stored codes are rebuilt or absorbed,
quantised keys and values are decoded in their rotated basis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.runtime.absorbing import (
    absorbing_pays,
    affine_maps,
    mapped_sums,
    stored_map,
    with_ones,
)
from kvfold.runtime.codes import CodeStore
from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.layer import FoldedAttention, NewTokens, RotaryAt, Rotation, StoredSlots
from kvfold.runtime.masks import (
    MaskKind,
    grouped_mask,
    query_blocks,
    stored_places,
    visible_columns,
    visible_slots,
)
from kvfold.runtime.online_softmax import StreamingSoftmax
from kvfold.runtime.schedule import Step

SLOT_BLOCK = 512


def stream(
    fold: FoldedAttention,
    layer: FoldedLayer,
    store: CodeStore | None,
    step: Step,
    new: NewTokens,
    rotary_at: RotaryAt,
    *,
    decoding: bool,
) -> Tensor:
    """Attention output of the step's queries: (batch, heads, new, head_dim).

    decoding: one query a row, whose own key is in the ring already.
    """
    outputs = []
    for block in query_blocks(step):
        queries = new.queries[:, :, block]
        batch, heads, count, width = queries.shape
        grouped = queries.reshape(batch, fold.anatomy.kv_heads, -1, width)
        state = StreamingSoftmax(batch, fold.anatomy.kv_heads, grouped.shape[2], queries)
        repeat = heads // fold.anatomy.kv_heads
        _add_exact(fold, layer, step, new, block, grouped, state, repeat, decoding)
        most = visible_slots(step, block)
        reader = _reader(fold, layer, store, grouped, count, rotary_at, most)
        for start in range(0, most, SLOT_BLOCK):
            slots = range(start, min(start + SLOT_BLOCK, most))
            reader.add(state, slots, grouped_mask(step, block, "slots", slots, repeat))
        output = reader.finish(state).to(queries.dtype)
        outputs.append(output.view(batch, heads, count, width))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _add_exact(
    fold: FoldedAttention,
    layer: FoldedLayer,
    step: Step,
    new: NewTokens,
    block: slice,
    grouped: Tensor,
    state: StreamingSoftmax,
    repeat: int,
    decoding: bool,
) -> None:
    """The exact part of a query block: stored places and, unless decoding, new columns."""
    stored = stored_places(step, block, layer.exact_places)
    kind: MaskKind = "written" if decoding else "stored"
    parts = [(kind, stored, layer.keys[:, :, stored], layer.values[:, :, stored])]
    if not decoding:
        columns = visible_columns(step, block)
        parts.append(("new", columns, new.keys[:, :, columns], new.values[:, :, columns]))
    for kind, places, keys, values in parts:
        if keys.shape[2]:
            logits = torch.matmul(grouped, keys.transpose(2, 3)) * fold.scaling
            mask = grouped_mask(step, block, kind, range(places.start, places.stop), repeat)
            state.add("values", logits, mask, values)


class _Queries(NamedTuple):
    """One block of queries by kv head: (batch, kv_heads, grouped, head_dim), and their bias.

    bias: what is added to logits of slots, (kv_heads, grouped, 1), or None.
    """

    grouped: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, fold: FoldedAttention, grouped: Tensor, count: int) -> _Queries:
        bias = fold.slot_bias()
        if bias is not None:
            by_kv_head = bias.view(fold.anatomy.kv_heads, -1).repeat_interleave(count, dim=1)
            bias = by_kv_head[..., None].to(grouped.dtype)
        return cls(grouped, bias)

    def scaled(self, logits: Tensor, scaling: float) -> Tensor:
        """Logits of slots, scaled and biased."""
        logits = logits * scaling
        return logits if self.bias is None else logits + self.bias


class _SlotReader(ABC):
    """Turns blocks of slots into logits and values for one block of queries."""

    @abstractmethod
    def add(self, state: StreamingSoftmax, slots: range, mask: Tensor) -> None:
        """Add slots to the softmax; mask: (rows, 1, grouped, slots)."""

    @abstractmethod
    def finish(self, state: StreamingSoftmax) -> Tensor:
        """The output: (batch, kv_heads, grouped, head_dim)."""


def _reader(
    fold: FoldedAttention,
    layer: FoldedLayer,
    store: CodeStore | None,
    grouped: Tensor,
    count: int,
    rotary_at: RotaryAt,
    slots: int,
) -> _SlotReader:
    queries = _Queries.of(fold, grouped, count)
    if fold.reading == "expanded":
        return _QuantisedReader(fold, layer, queries)
    assert store is not None
    return _CodeReader(fold, layer, store, queries, rotary_at, slots)


class _QuantisedReader(_SlotReader):
    """Keys and values of the layer's own, decoded in the rotated basis.

    Queries are rotated once instead of all keys, and the sum of values is turned back once.
    """

    def __init__(self, fold: FoldedAttention, layer: FoldedLayer, queries: _Queries) -> None:
        self.fold = fold
        self.queries = queries
        self.keys, self.values = layer.stores["slot_keys"], layer.stores["slot_values"]
        assert self.keys.codec is not None
        self.rotated = self.keys.codec.rotate(queries.grouped)

    def add(self, state: StreamingSoftmax, slots: range, mask: Tensor) -> None:
        block = slice(slots.start, slots.stop)
        keys = self.keys.read_rotated(block)
        logits = torch.matmul(self.rotated, keys.transpose(2, 3))
        logits = self.queries.scaled(logits, self.fold.scaling)
        state.add("rotated", logits, mask, self.values.read_rotated(block))

    def finish(self, state: StreamingSoftmax) -> Tensor:
        assert self.values.codec is not None
        output = state.sums.get("values")
        if "rotated" in state.sums:
            turned = self.values.codec.unrotate(state.sums["rotated"])
            output = turned if output is None else output + turned
        assert output is not None
        return output / state.total


class _CodeReader(_SlotReader):
    """Codes that several layers share, rebuilt or absorbed, whichever is less work.

    Quantised codes stay in their rotated basis where turning the layer's maps into it is less work
    than turning the codes back.
    """

    def __init__(
        self,
        fold: FoldedAttention,
        layer: FoldedLayer,
        store: CodeStore,
        queries: _Queries,
        rotary_at: RotaryAt,
        slots: int,
    ) -> None:
        self.fold = fold
        self.layer = layer
        self.store = store
        self.queries = queries
        self.rotary_at = rotary_at
        self.key_map, self.value_map = affine_maps(fold.method, fold.index)
        self.sums_codes = self.value_map is not None and self._absorbing_pays(slots)
        self.rotated = self._rotating_pays(slots)
        if fold.absorbs_keys():
            self._absorb_keys()
            self.key_map = None
        if self.rotated and self.key_map is not None:
            self.key_map = stored_map(fold.pipeline, self.key_map)
        if self.rotated and not self.sums_codes and self.value_map is not None:
            self.value_map = stored_map(fold.pipeline, self.value_map)

    def _absorbing_pays(self, slots: int) -> bool:
        shape = self.fold.anatomy
        return absorbing_pays(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            code_width=self.fold.method.code_width,
            queries=self.queries.grouped.shape[2] * shape.kv_heads // shape.heads,
            slots=slots,
        )

    def _rotating_pays(self, slots: int) -> bool:
        maps = [] if self.fold.absorbs_keys() else [self.key_map]
        maps += [] if self.sums_codes else [self.value_map]
        if not self.store.slots.quantised or None in maps:
            return False
        return len(maps) * self.fold.anatomy.kv_width < slots * len(self.queries.grouped)

    def _absorb_keys(self) -> None:
        """a = W_N Gamma_N q_N and its constant b_N Gamma_N q_N, per grouped query."""
        assert self.key_map is not None
        weight, bias = self.fold.head_map(self.key_map)
        turned = self.fold.anatomy.rotary_dim
        grouped = self.queries.grouped
        straight = grouped[..., turned:]
        _, gamma = self.fold.key_scales(grouped[:, :, :1])
        if gamma is not None:
            straight = straight * gamma[turned:].to(straight.dtype)
        self.absorbed = torch.matmul(straight, weight[:, turned:])
        self.constant = torch.matmul(straight, bias[:, turned:, None])
        if self.rotated:
            self.absorbed = self.fold.pipeline.rotated(self.absorbed)

    def add(self, state: StreamingSoftmax, slots: range, mask: Tensor) -> None:
        block = slice(slots.start, slots.stop)
        stored = self.store.slots
        codes = stored.read_rotated(block) if self.rotated else stored.read(block)
        keys, values = self._rebuilt(codes, slots)
        if keys is None:
            logits = self._absorbed_logits(slots, codes)
        else:
            logits = torch.matmul(self.queries.grouped, keys.transpose(2, 3))
        logits = self.queries.scaled(logits, self.fold.scaling)
        if values is not None:
            state.add("values", logits, mask, values)
            return
        state.add("codes", logits, mask, with_ones(codes))

    def _rebuilt(self, codes: Tensor, slots: range) -> tuple[Tensor | None, Tensor | None]:
        """Attention-ready keys and values of slots; None what is absorbed."""
        fold, keys, values = self.fold, None, None
        if self.value_map is None or (self.key_map is None and not fold.absorbs_keys()):
            keys, values = fold.unfold(codes, self._rotation(codes, slots))
            return keys, None if self.sums_codes else values
        if self.key_map is not None:
            flat = functional.linear(codes[:, 0], *self.key_map)
            keys = fold.finish_keys(fold.heads(flat), self._rotation(codes, slots))
        if not self.sums_codes:
            values = fold.heads(functional.linear(codes[:, 0], *self.value_map))
        return keys, values

    def _rotation(self, codes: Tensor, slots: range) -> Rotation:
        place = self.fold.pipeline.slot_position
        return self.rotary_at(StoredSlots(self.layer.schedule, slots, place, codes.device))

    def _absorbed_logits(self, slots: range, codes: Tensor) -> Tensor:
        logits = torch.matmul(self.absorbed, codes.transpose(2, 3)) + self.constant
        block = slice(slots.start, slots.stop)
        if "rho" in self.layer.stores:
            logits = logits * self.layer.stores["rho"].read(block).transpose(2, 3)
        if "rotary" in self.layer.stores:
            rotary = self.layer.stores["rotary"].read(block)
            turned = self.fold.anatomy.rotary_dim
            grouped = self.queries.grouped[..., :turned]
            logits = logits + torch.matmul(grouped, rotary.transpose(2, 3))
        return logits

    def finish(self, state: StreamingSoftmax) -> Tensor:
        output = state.sums.get("values")
        if "codes" in state.sums:
            assert self.value_map is not None
            weight, bias = self.fold.head_map(self.value_map)
            mapped = mapped_sums(
                *(self.fold.pipeline, state.sums["codes"], weight.transpose(1, 2), bias[:, None]),
                rotated=self.rotated,
            )
            output = mapped if output is None else output + mapped
        assert output is not None
        return output / state.total
