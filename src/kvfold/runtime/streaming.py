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

from kvfold.runtime.codes import CodeStore
from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.layer import FoldedAttention, NewTokens, RotaryAt, StoredSlots
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
        reader = _reader(fold, layer, store, grouped, count, rotary_at)
        most = visible_slots(step, block)
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
) -> _SlotReader:
    queries = _Queries.of(fold, grouped, count)
    if fold.reading == "expanded":
        return _QuantisedReader(fold, layer, queries)
    assert store is not None
    return _CodeReader(fold, layer, store, queries, rotary_at)


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
    """Codes that several layers share, rebuilt or absorbed as the layer's reading says."""

    def __init__(
        self,
        fold: FoldedAttention,
        layer: FoldedLayer,
        store: CodeStore,
        queries: _Queries,
        rotary_at: RotaryAt,
    ) -> None:
        self.fold = fold
        self.layer = layer
        self.store = store
        self.queries = queries
        self.rotary_at = rotary_at
        self.values = None
        if fold.absorbs_values():
            affine = fold.method.affine_values(fold.index)
            assert affine is not None
            self.values = fold.head_map(affine)
        if fold.absorbs_keys():
            self._absorb_keys()

    def _absorb_keys(self) -> None:
        """a = W_N Gamma_N q_N and its constant b_N Gamma_N q_N, per grouped query."""
        affine = self.fold.method.affine_keys(self.fold.index)
        assert affine is not None
        weight, bias = self.fold.head_map(affine)
        turned = self.fold.anatomy.rotary_dim
        grouped = self.queries.grouped
        straight = grouped[..., turned:]
        _, gamma = self.fold.key_scales(grouped[:, :, :1])
        if gamma is not None:
            straight = straight * gamma[turned:].to(straight.dtype)
        self.absorbed = torch.matmul(straight, weight[:, turned:])
        self.constant = torch.matmul(straight, bias[:, turned:, None])

    def add(self, state: StreamingSoftmax, slots: range, mask: Tensor) -> None:
        codes = self.store.slots.read(slice(slots.start, slots.stop))
        keys = values = None
        if not self.fold.absorbs_keys() or self.values is None:
            place = self.fold.pipeline.slot_position
            stored = StoredSlots(self.layer.schedule, slots, place, codes.device)
            keys, values = self.fold.unfold(codes, self.rotary_at(stored))
        if self.fold.absorbs_keys():
            logits = self._absorbed_logits(slots, codes)
        else:
            assert keys is not None
            logits = torch.matmul(self.queries.grouped, keys.transpose(2, 3))
        logits = self.queries.scaled(logits, self.fold.scaling)
        if self.values is None:
            assert values is not None
            state.add("values", logits, mask, values)
            return
        # The bias of the value map counts once per unit of weight, so it rides along as a
        # column of ones beside the codes.
        ones = codes.new_ones(*codes.shape[:3], 1)
        state.add("codes", logits, mask, torch.cat([codes, ones], dim=-1))

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
        if self.values is not None and "codes" in state.sums:
            summed = state.sums["codes"]
            weight, bias = (part.to(summed.dtype) for part in self.values)
            mapped = torch.matmul(summed[..., :-1], weight.transpose(1, 2))
            mapped = mapped + summed[..., -1:] * bias[:, None]
            output = mapped if output is None else output + mapped
        assert output is not None
        return output / state.total
