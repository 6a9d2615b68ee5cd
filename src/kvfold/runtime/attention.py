"""Attention over anchors, window and slots.

`attend` is the one entry. Where slots are expanded it hands whole key blocks to SDPA; where codes
are kept it streams over blocks of slots with an online softmax (`StreamingSoftmax`), rebuilding a
block's keys and values or working on its codes, so the whole history never exists at once.
Queries go in blocks too: memory grows with the length, never with its square.

The plain reference of all of it is `kvfold.runtime.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.runtime.codes import CodeStore
from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.layer import FoldedAttention, Rotation
from kvfold.runtime.schedule import Step

QUERY_BLOCK = 256
SLOT_BLOCK = 512

RotaryAt = Callable[[Tensor], Rotation]
"""Positions (rows, seq) to their rotation."""


@dataclass(frozen=True)
class NewTokens:
    """The step's own queries, keys and values, post-norm and post-RoPE.

    queries: (batch, heads, new, head_dim); keys, values: (batch, kv_heads, new, head_dim).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


def attend(
    fold: FoldedAttention,
    layer: FoldedLayer,
    store: CodeStore | None,
    step: Step,
    new: NewTokens,
    rotary_at: RotaryAt,
) -> Tensor:
    """Attention output of the step's queries: (batch, heads, new, head_dim).

    Writes the layer's anchors and ring. Slots that the queries may see must be written already.
    """
    layer.write_anchors(step, new.keys, new.values)
    streams = fold.reading in ("shared", "absorbed") and step.most_slots > 0
    if step.new == 1:
        layer.write_ring(step, new.keys, new.values)
        if streams:
            output = _stream(fold, layer, store, step, new, rotary_at, decoding=True)
        else:
            output = _decode(fold, layer, step, new.queries)
        return output
    if not step.folded and step.uniform and step.before[0] == 0:
        output = _sdpa(fold, new.queries, new.keys, new.values, None, causal=True)
    elif streams:
        output = _stream(fold, layer, store, step, new, rotary_at, decoding=False)
    else:
        output = _prefill(fold, layer, step, new)
    layer.write_ring(step, new.keys, new.values)
    return output


def _sdpa(
    fold: FoldedAttention,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    causal: bool = False,
) -> Tensor:
    return functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=fold.scaling,
        enable_gqa=fold.anatomy.heads != fold.anatomy.kv_heads,
    )


def _decode(fold: FoldedAttention, layer: FoldedLayer, step: Step, queries: Tensor) -> Tensor:
    """One query a row, over the layer's buffer as it lies."""
    fixed = layer.schedule.exact_size
    slots = step.most_slots if fold.reading == "expanded" else 0
    if step.uniform and layer.schedule.group == 1:
        seen = step.after[0]
        length = fixed + slots if slots else min(seen, fixed)
        return _sdpa(fold, queries, layer.keys[:, :, :length], layer.values[:, :, :length], None)
    length = fixed + slots
    mask = _stored_mask(step, slice(0, 1), written=True)
    if slots:
        mask = torch.cat([mask, _slot_mask(step, slice(0, 1), range(slots))], dim=-1)
    mask = _see_something(mask, step, slice(0, 1))
    return _sdpa(fold, queries, layer.keys[:, :, :length], layer.values[:, :, :length], mask)


def _prefill(fold: FoldedAttention, layer: FoldedLayer, step: Step, new: NewTokens) -> Tensor:
    """Blocks of queries over [stored exact | new | slots] with a mask."""
    fixed = layer.schedule.exact_size
    outputs = []
    for block in _query_blocks(step):
        columns = _visible_columns(step, block)
        stored = _stored_places(step, block)
        slots = _visible_slots(step, block) if fold.reading == "expanded" else 0
        masks = [
            _stored_mask(step, block, written=False)[..., stored],
            _new_mask(step, block, columns),
        ]
        keys = [layer.keys[:, :, stored], new.keys[:, :, columns]]
        values = [layer.values[:, :, stored], new.values[:, :, columns]]
        if slots:
            masks.append(_slot_mask(step, block, range(slots)))
            keys.append(layer.keys[:, :, fixed : fixed + slots])
            values.append(layer.values[:, :, fixed : fixed + slots])
        mask = _see_something(torch.cat(masks, dim=-1), step, block)
        block_queries = new.queries[:, :, block]
        outputs.append(
            _sdpa(fold, block_queries, torch.cat(keys, dim=2), torch.cat(values, dim=2), mask)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _query_blocks(step: Step) -> Iterator[slice]:
    for start in range(0, step.new, QUERY_BLOCK):
        yield slice(start, min(start + QUERY_BLOCK, step.new))


def _visible_columns(step: Step, block: slice) -> slice:
    """New columns that some query of the block may see: a band, or all up to it."""
    if not step.folded:
        return slice(0, block.stop)
    return slice(max(0, block.start - step.schedule.ring_size), block.stop)


def _stored_places(step: Step, block: slice) -> slice:
    """Exact places that some query of the block may see: past the window only the anchors."""
    beyond = step.folded and block.start - step.most_pads >= step.schedule.ring_size
    return slice(0, step.schedule.anchors if beyond else step.schedule.exact_size)


def _visible_slots(step: Step, block: slice) -> int:
    """Slots that the block's last query may see, in the longest row."""
    if not step.folded:
        return step.most_slots
    back = step.new - block.stop
    longest = max(step.after[row] for row in step.rows)
    return step.schedule.slots(longest - back)


def _stored_mask(step: Step, block: slice, *, written: bool) -> Tensor:
    """(rows, 1, queries, A + R): anchors up to the query, window from its horizon on."""
    held = step.stored_positions(written=written)[:, None, :]
    query = step.positions[:, block, None]
    in_window = held >= step.horizon[:, block, None]
    is_anchor = held < step.schedule.anchors
    return ((held >= 0) & (held <= query) & (in_window | is_anchor))[:, None]


def _new_mask(step: Step, block: slice, columns: slice) -> Tensor:
    """(rows, 1, queries, columns): causal, from the horizon on; new anchors are seen as stored."""
    held = step.positions[:, None, columns]
    query = step.positions[:, block, None]
    seen = (held <= query) & (held >= step.horizon[:, block, None])
    tokens = step.valid[:, None, columns] & (held >= step.schedule.anchors)
    return (seen & tokens)[:, None]


def _slot_mask(step: Step, block: slice, slots: range) -> Tensor:
    """(rows, 1, queries, slots): slots whose tokens all lie before the horizon."""
    schedule = step.schedule
    ends = torch.arange(slots.start + 1, slots.stop + 1, device=step.device)
    last = schedule.anchors + schedule.group * ends
    return (last[None, None] <= step.horizon[:, block, None])[:, None]


def _see_something(mask: Tensor, step: Step, block: slice) -> Tensor:
    """Let pad queries see everything, so that their (unused) softmax has a sum."""
    if step.uniform:
        return mask
    return mask | ~step.valid[:, None, block, None]


class StreamingSoftmax:
    """Softmax over keys that come in blocks: running maximum, sum and weighted sums.

    queries: (batch, kv_heads, grouped, head_dim) where `grouped` runs over the query heads of a
    kv head and their queries. Sums are kept in at least float32.
    """

    def __init__(self, batch: int, kv_heads: int, grouped: int, like: Tensor) -> None:
        self.dtype = torch.float32 if like.element_size() < 4 else like.dtype
        shape = (batch, kv_heads, grouped, 1)
        self.maximum = torch.full(shape, -torch.inf, dtype=self.dtype, device=like.device)
        self.total = torch.zeros(shape, dtype=self.dtype, device=like.device)
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, logits: Tensor, mask: Tensor, values: Tensor) -> None:
        """Add a block to the sum called `name`.

        logits: (batch, kv_heads, grouped, block), scaled; mask: the same, or broadcast to it,
        true where seen; values: (batch, kv_heads or 1, block, width).
        """
        logits = logits.to(self.dtype).masked_fill(~mask, -torch.inf)
        highest = torch.maximum(self.maximum, logits.amax(-1, keepdim=True))
        anchor = highest.masked_fill(highest == -torch.inf, 0.0)
        shrink = torch.exp(self.maximum - anchor)
        weights = torch.exp(logits - anchor)
        self.total = self.total * shrink + weights.sum(-1, keepdim=True)
        self.sums = {key: value * shrink for key, value in self.sums.items()}
        added = torch.matmul(weights, values.to(self.dtype))
        self.sums[name] = self.sums[name] + added if name in self.sums else added
        self.maximum = highest


def _stream(
    fold: FoldedAttention,
    layer: FoldedLayer,
    store: CodeStore | None,
    step: Step,
    new: NewTokens,
    rotary_at: RotaryAt,
    *,
    decoding: bool,
) -> Tensor:
    assert store is not None and store.codes is not None
    outputs = []
    for block in _query_blocks(step):
        queries = new.queries[:, :, block]
        batch, heads, count, width = queries.shape
        grouped = queries.reshape(batch, fold.anatomy.kv_heads, -1, width)
        state = StreamingSoftmax(batch, fold.anatomy.kv_heads, grouped.shape[2], queries)
        repeat = heads // fold.anatomy.kv_heads
        _add_exact(fold, layer, step, new, block, grouped, state, repeat, decoding)
        reader = _SlotReader(fold, layer, grouped)
        for start in range(0, _visible_slots(step, block), SLOT_BLOCK):
            slots = range(start, min(start + SLOT_BLOCK, _visible_slots(step, block)))
            mask = _see_something(_slot_mask(step, block, slots), step, block)
            codes = store.codes[:, :, slots.start : slots.stop]
            reader.add(state, slots, codes, mask.repeat(1, 1, repeat, 1), rotary_at)
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
    stored = _stored_places(step, block)
    parts = [
        (
            layer.keys[:, :, stored],
            layer.values[:, :, stored],
            _stored_mask(step, block, written=decoding)[..., stored],
        )
    ]
    if not decoding:
        columns = _visible_columns(step, block)
        mask = _new_mask(step, block, columns)
        parts.append((new.keys[:, :, columns], new.values[:, :, columns], mask))
    for keys, values, mask in parts:
        if keys.shape[2]:
            logits = torch.matmul(grouped, keys.transpose(2, 3)) * fold.scaling
            seen = _see_something(mask, step, block).repeat(1, 1, repeat, 1)
            state.add("values", logits, seen, values)


class _SlotReader:
    """Reads blocks of codes for one block of queries, as the layer's reading says."""

    def __init__(self, fold: FoldedAttention, layer: FoldedLayer, grouped: Tensor) -> None:
        self.fold = fold
        self.layer = layer
        self.queries = grouped
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
        straight = self.queries[..., turned:]
        _, gamma = self.fold.key_scales(self.queries[:, :, :1])
        if gamma is not None:
            straight = straight * gamma[turned:].to(straight.dtype)
        self.absorbed = torch.matmul(straight, weight[:, turned:])
        self.constant = torch.matmul(straight, bias[:, turned:, None])

    def add(
        self,
        state: StreamingSoftmax,
        slots: range,
        codes: Tensor,
        mask: Tensor,
        rotary_at: RotaryAt,
    ) -> None:
        """Add slots to the softmax. codes: (batch, 1, slots, code_width)."""
        keys = values = None
        if not self.fold.absorbs_keys() or self.values is None:
            positions = torch.arange(slots.start, slots.stop, device=codes.device)
            rotation = rotary_at(positions[None] + self.layer.schedule.anchors)
            keys, values = self.fold.unfold(codes, rotation)
        if self.fold.absorbs_keys():
            logits = self._absorbed_logits(slots, codes)
        else:
            assert keys is not None
            logits = torch.matmul(self.queries, keys.transpose(2, 3))
        logits = logits * self.fold.scaling
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
        if self.layer.rho is not None:
            rho = self.layer.rho[:, :, slots.start : slots.stop]
            logits = logits * rho.transpose(2, 3)
        turned = self.fold.anatomy.rotary_dim
        if turned:
            assert self.layer.rotary is not None
            rotary = self.layer.rotary[:, :, slots.start : slots.stop]
            logits = logits + torch.matmul(self.queries[..., :turned], rotary.transpose(2, 3))
        return logits

    def finish(self, state: StreamingSoftmax) -> Tensor:
        """The output: (batch, kv_heads, grouped, head_dim)."""
        output = state.sums.get("values")
        if self.values is not None and "codes" in state.sums:
            summed = state.sums["codes"]
            weight, bias = (part.to(summed.dtype) for part in self.values)
            mapped = torch.matmul(summed[..., :-1], weight.transpose(1, 2))
            mapped = mapped + summed[..., -1:] * bias[:, None]
            output = mapped if output is None else output + mapped
        assert output is not None
        return output / state.total
