"""Attention over anchors, window and slots.

`attend` is the one entry. Where slots are expanded it hands whole key blocks to SDPA; where they
are codes or quantised it streams over blocks of them (`kvfold.runtime.streaming`), or, for one
new token over quantised slots, reads them packed as they are. Queries go in blocks too: memory
grows with the length, never with its square.

The plain reference of all of it is `kvfold.runtime.reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.runtime.codes import CodeStore
from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.layer import FoldedAttention, NewTokens, RotaryAt
from kvfold.runtime.masks import (
    decode_mask,
    prefill_mask,
    query_blocks,
    stored_places,
    visible_columns,
    visible_slots,
    with_slot_bias,
)
from kvfold.runtime.quantised_reading import slot_logits, slot_mix
from kvfold.runtime.schedule import Step
from kvfold.runtime.streaming import stream

DECODED_SLOTS = 8192
"""Up to so many quantised slots a prefill decodes one layer's at once, and streams over more."""


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
    quantised = fold.reading == "expanded" and "slot_keys" in layer.stores
    streams = fold.reading in ("shared", "absorbed") and step.most_slots > 0
    if step.new == 1:
        layer.write_ring(step, new.keys, new.values)
        if quantised and step.most_slots > 0:
            return _decode_quantised(fold, layer, step, new.queries)
        if streams:
            return stream(fold, layer, store, step, new, rotary_at, decoding=True)
        return _decode(fold, layer, step, new.queries)
    if not step.folded and step.uniform and step.before[0] == 0:
        output = _sdpa(fold, new.queries, new.keys, new.values, None, causal=True)
    elif streams or (quantised and step.most_slots > DECODED_SLOTS):
        output = stream(fold, layer, store, step, new, rotary_at, decoding=False)
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
    fixed = layer.exact_places
    slots = step.most_slots if fold.reading == "expanded" else 0
    length = fixed + slots if slots else min(max(step.after), fixed)
    keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
    bias = fold.slot_bias() if slots else None
    mask = None
    if not step.uniform or layer.schedule.group > 1 or bias is not None:
        mask = decode_mask(step, fixed, slots)[..., :length]
        mask = with_slot_bias(mask, bias, slots, step, key=(fixed, slots))
    # Query heads of a kv head as its queries: they see the same, and SDPA is a third quicker on a
    # CPU than with enable_gqa.
    shape = (queries.shape[0], fold.anatomy.kv_heads, -1, queries.shape[-1])
    if mask is not None and mask.shape[1] > 1:
        mask = mask.view(mask.shape[0], fold.anatomy.kv_heads, -1, mask.shape[-1])
    output = functional.scaled_dot_product_attention(
        queries.view(shape), keys, values, attn_mask=mask, scale=fold.scaling
    )
    return output.reshape(queries.shape)  # on a GPU, heads may lie behind queries in memory


def _decode_quantised(
    fold: FoldedAttention, layer: FoldedLayer, step: Step, queries: Tensor
) -> Tensor:
    """One query a row, over exact places and packed slots, with one softmax for both."""
    batch, heads, _, width = queries.shape
    fixed, slots = layer.exact_places, slice(0, step.most_slots)
    keys, values = layer.stores["slot_keys"], layer.stores["slot_values"]
    assert keys.codec is not None and values.codec is not None
    grouped = queries.view(batch, fold.anatomy.kv_heads, -1, width)
    near = torch.matmul(grouped, layer.keys[:, :, :fixed].transpose(2, 3))
    far = slot_logits(keys.codec, keys.codec.rotate(grouped), keys.quantised(slots))
    logits = torch.cat([near.to(far.dtype), far], dim=-1) * fold.scaling
    bias = fold.slot_bias()
    if bias is not None:
        logits[..., fixed:] += bias.view(fold.anatomy.kv_heads, -1, 1)
    if layer.schedule.group > 1 or not step.uniform:
        logits = logits.masked_fill(~decode_mask(step, fixed, slots.stop), -torch.inf)
    weights = logits.softmax(dim=-1)
    mixed = slot_mix(values.codec, weights[..., fixed:], values.quantised(slots))
    output = values.codec.unrotate(mixed).to(queries.dtype)
    output += torch.matmul(weights[..., :fixed].to(queries.dtype), layer.values[:, :, :fixed])
    return output.view(batch, heads, 1, width)


def _prefill(fold: FoldedAttention, layer: FoldedLayer, step: Step, new: NewTokens) -> Tensor:
    """Blocks of queries over [stored exact | new | slots] with a mask.

    Where slots are quantised all of it happens in their rotated basis: turning queries and exact
    tokens into it, and outputs back, is less work than turning every slot.
    """
    fixed = layer.exact_places
    most = step.most_slots if fold.reading == "expanded" else 0
    turn, turn_back = layer.rotations(quantised=most > 0)
    queries, new_keys, new_values = turn(new.queries), turn(new.keys), turn(new.values)
    exact_keys, exact_values = turn(layer.keys[:, :, :fixed]), turn(layer.values[:, :, :fixed])
    slot_keys, slot_values = layer.visible_slots(most)
    outputs = []
    for block in query_blocks(step):
        columns, stored = visible_columns(step, block), stored_places(step, block, fixed)
        slots = visible_slots(step, block) if most else 0
        keys = [exact_keys[:, :, stored], new_keys[:, :, columns], slot_keys[:, :, :slots]]
        values = [exact_values[:, :, stored], new_values[:, :, columns], slot_values[:, :, :slots]]
        mask = with_slot_bias(
            prefill_mask(step, block, fixed, slots),
            fold.slot_bias(),
            slots,
            step,
            key=(block.start, block.stop, fixed, slots),
        )
        keys_here, values_here = torch.cat(keys, dim=2), torch.cat(values, dim=2)
        outputs.append(_sdpa(fold, queries[:, :, block], keys_here, values_here, mask))
    return turn_back(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2))
