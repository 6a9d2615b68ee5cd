"""Who sees what: masks over stored exact places, new columns and slots.

All are boolean, (rows, 1, queries, places), true where seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from kvfold.runtime.schedule import Step

QUERY_BLOCK = 128
"""Queries that share a mask: fewer waste less of the band, more take fewer calls."""

MaskKind = Literal["stored", "written", "new", "slots"]


def query_blocks(step: Step) -> Iterator[slice]:
    """The step's columns in blocks."""
    for start in range(0, step.new, QUERY_BLOCK):
        yield slice(start, min(start + QUERY_BLOCK, step.new))


def visible_columns(step: Step, block: slice) -> slice:
    """New columns that some query of the block may see: a band, or all up to it."""
    if not step.folded:
        return slice(0, block.stop)
    return slice(max(0, block.start - step.schedule.ring_size), block.stop)


def stored_places(step: Step, block: slice, exact: int) -> slice:
    """Those of `exact` places that a query of the block may see: past the window only anchors."""
    beyond = step.folded and block.start - step.most_pads >= step.schedule.ring_size
    return slice(0, min(step.schedule.anchors, exact) if beyond else exact)


def visible_slots(step: Step, block: slice) -> int:
    """Slots that the block's last query may see, in the longest row."""
    if not step.folded:
        return step.most_slots
    back = step.new - block.stop
    return max(step.visible(row, step.after[row] - back) for row in step.rows)


def stored_mask(step: Step, block: slice, exact: int, *, written: bool) -> Tensor:
    """(rows, 1, queries, exact): anchors up to the query, window from its exact horizon on."""
    held = step.stored_positions(exact, written=written)[:, None, :]
    query = step.positions[:, block, None]
    in_window = held >= step.exact_horizon[:, block, None]
    is_anchor = held < step.schedule.anchors
    return ((held >= 0) & (held <= query) & (in_window | is_anchor))[:, None]


def new_mask(step: Step, block: slice, columns: slice) -> Tensor:
    """(rows, 1, queries, columns): causal, from the horizon on; new anchors are seen as stored."""
    held = step.positions[:, None, columns]
    query = step.positions[:, block, None]
    seen = (held <= query) & (held >= step.exact_horizon[:, block, None])
    tokens = step.valid[:, None, columns] & (held >= step.schedule.anchors)
    return (seen & tokens)[:, None]


def slot_mask(step: Step, block: slice, slots: range) -> Tensor:
    """(rows, 1, queries, slots): slots whose tokens all lie before the horizon."""
    schedule = step.schedule
    ends = torch.arange(slots.start + 1, slots.stop + 1, device=step.device)
    last = schedule.anchors + schedule.group * ends
    return (last[None, None] <= step.horizon[:, block, None])[:, None]


def see_something(mask: Tensor, step: Step, block: slice) -> Tensor:
    """Let pad queries see everything, so that their (unused) softmax has a sum."""
    if step.uniform:
        return mask
    return mask | ~step.valid[:, None, block, None]


def decode_mask(step: Step, exact: int, slots: int) -> Tensor:
    """Of one query a row over [exact places | slots]."""

    def make() -> Tensor:
        only = slice(0, 1)
        mask = stored_mask(step, only, exact, written=True)
        if slots:
            mask = torch.cat([mask, slot_mask(step, only, range(slots))], dim=-1)
        return see_something(mask, step, only)

    return step.remember(("decode_mask", exact, slots), make)


def prefill_mask(step: Step, block: slice, exact: int, slots: int) -> Tensor:
    """Of a block of queries over [stored exact places | new columns | slots]."""

    def make() -> Tensor:
        masks = [
            stored_mask(step, block, stored_places(step, block, exact).stop, written=False),
            new_mask(step, block, visible_columns(step, block)),
        ]
        if slots:
            masks.append(slot_mask(step, block, range(slots)))
        return see_something(torch.cat(masks, dim=-1), step, block)

    return step.remember(("prefill_mask", block.start, block.stop, exact, slots), make)


def grouped_mask(
    step: Step,
    block: slice,
    kind: MaskKind,
    places: range,
    repeat: int,
) -> Tensor:
    """One part of a block's mask for queries grouped by kv head, (rows, 1, repeat * queries, n).

    kind: stored exact places before or after the step's write, new columns, or slots; places:
    which of them. repeat: query heads of a kv head.
    """

    def make() -> Tensor:
        if kind == "slots":
            mask = slot_mask(step, block, places)
        elif kind == "new":
            mask = new_mask(step, block, slice(places.start, places.stop))
        else:
            mask = stored_mask(step, block, places.stop, written=kind == "written")
            mask = mask[..., places.start :]
        return see_something(mask, step, block).repeat(1, 1, repeat, 1)

    return step.remember(("grouped", block.start, block.stop, kind, places, repeat), make)


def with_slot_bias(
    mask: Tensor, bias: Tensor | None, slots: int, step: Step, *, key: tuple[int, ...] = ()
) -> Tensor:
    """The mask of a layer whose last `slots` places are slots with a logit bias.

    mask: the same for all layers of `step`, which `key` tells from its others. bias: (query
    heads,) or None, which leaves the mask boolean. Else the result is what is added to logits,
    (rows, heads, queries, places) in the bias's dtype, good until the next layer asks.
    """
    if bias is None or slots == 0:
        return mask

    def make() -> Tensor:
        zero = torch.zeros((), dtype=bias.dtype, device=bias.device)
        return torch.where(mask, zero, -torch.inf)

    base = step.remember(("additive", *key, bias.dtype), make)
    heads = bias.shape[0]
    # One buffer for all layers, since a new one of this size costs more than what is written.
    added = step.remember(("biased", *key, bias.dtype, heads), lambda: base.repeat(1, heads, 1, 1))
    places = slice(mask.shape[-1] - slots, None)
    torch.add(base[..., places], bias[None, :, None, None], out=added[..., places])
    return added
