"""Rows in plain form into an empty cache; `state` says what they must hold and where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvfold.anatomy import LayerAnatomy
from kvfold.runtime.columns import PAD
from kvfold.runtime.remaking import expand, refill
from kvfold.runtime.state import Layout, Place, RowState, kept_tokens

if TYPE_CHECKING:
    from kvfold.runtime.attach import Attachment
    from kvfold.runtime.cache import FoldedCache


def fill(attachment: Attachment, cache: FoldedCache, states: Sequence[RowState]) -> None:
    """Put rows into an empty cache; see `Attachment.cache_from`."""
    layout = Layout(attachment, cache)
    for state in states:
        layout.check(state)
    seen = [state.seen_tokens for state in states]
    most = max(seen, default=0)
    if not states:
        return
    device = attachment.model.device
    _fill_folded(layout, states, device)
    for layer in layout.unfolded():
        if most:
            _fill_unfolded(cache.layers[layer.index], layer, states, device)
    table = torch.full((len(seen), most), PAD, dtype=torch.int32, device=device)
    for row, state in enumerate(states):
        table[row, most - seen[row] :] = state.token_ids.to(device)
    cache.restore(seen, table)


def _fill_folded(layout: Layout, states: Sequence[RowState], device: torch.device) -> None:
    most = max(state.seen_tokens for state in states)
    for index in layout.cache.folded:
        layer = layout.cache.folded_layer(index)
        layer.exact_places = layer.schedule.exact_places(most)
    places = [layout.places(state.seen_tokens) for state in states]
    buffers: dict[tuple[int, str], tuple[Place, int]] = {}
    for place in (place for row in places for place in row):
        key = (id(place.owner), place.attribute)
        end = place.start + place.room
        known = buffers.get(key, (place, 0))
        buffers[key] = (known[0], max(known[1], end))
    for place, room in buffers.values():
        if room == 0:
            continue
        heads, _, width = place.part.shape
        shape = (len(states), heads, room, width)
        made = torch.zeros(shape, dtype=place.part.dtype, device=device)
        setattr(place.owner, place.attribute, made)
    for row, (state, row_places) in enumerate(zip(states, places, strict=True)):
        for place in row_places:
            if place.is_used and place.name in state.tensors:
                buffer = getattr(place.owner, place.attribute)
                place.view(buffer, row).copy_(state.tensors[place.name])
    for row, state in enumerate(states):
        refill(layout, row, state)
        expand(layout, row, state, device)
    cache = layout.cache
    stores = [part for store in cache.stores.values() for part in store.slots.stores]
    for index in cache.folded:
        layer = cache.folded_layer(index)
        if layer.keys is not None:
            layer.adopt(layout.dtype, device)
        stores += layer.stores.values()
    for held in stores:
        held.dtype = layout.dtype


def _fill_unfolded(
    held: Any, layer: LayerAnatomy, states: Sequence[RowState], device: torch.device
) -> None:
    """Rows into a layer of transformers' own: aligned to the right, zeros for pads."""
    name = f"layers.{layer.index}"
    if layer.kind == "linear_attention":
        for kind in ("convolution", "recurrent"):
            like = next(s.tensors[f"{name}.{kind}"] for s in states if s.seen_tokens)
            rows = [s.tensors.get(f"{name}.{kind}", torch.zeros_like(like)) for s in states]
            whole = torch.stack([row.to(device) for row in rows])
            attribute = "conv_states" if kind == "convolution" else "recurrent_states"
            held.lazy_initialization(**{attribute: whole})
            getattr(held, attribute)[0].copy_(whole)
        held.has_previous_state[0] = True
        return
    most = max(state.seen_tokens for state in states)
    made = []
    for kind in ("keys", "values"):
        like = next(s.tensors[f"{name}.{kind}"] for s in states if s.seen_tokens)
        shape = (len(states), layer.kv_heads, kept_tokens(layer, most), layer.head_dim)
        whole = torch.zeros(shape, dtype=like.dtype, device=device)
        for row, state in enumerate(states):
            own = state.tensors.get(f"{name}.{kind}")
            if own is not None and own.shape[1]:
                whole[row, :, -own.shape[1] :] = own.to(device)
        made.append(whole)
    held.lazy_initialization(*made)
    held.keys, held.values = made
    if layer.sliding_window is not None:
        held.cumulative_length = most
