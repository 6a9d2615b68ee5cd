"""What a row may come without because its codes give it again: expanded slots, waiting codes.

`state` says which rows may, and tries whether the same bits come out before anything is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.layer import Rotation, StoredSlots

if TYPE_CHECKING:
    from kvfold.runtime.state import Layout, RowState


def slot_names(layer: FoldedLayer) -> tuple[str, str]:
    """What a layer's slots are called that lie in the buffers of its exact keys and values."""
    return f"layers.{layer.fold.index}.slots.keys", f"layers.{layer.fold.index}.slots.values"


def pending_name(number: int) -> str:
    """What the codes are called that wait in a store to become visible."""
    return f"codes.{number}.pending"


def refill(layout: Layout, row: int, state: RowState) -> None:
    """Put waiting codes in their ring that a row came without: the last of all codes."""
    for store in layout.to_refill(state.seen_tokens, state.tensors).values():
        made, size = store.schedule.made(state.seen_tokens), store.schedule.pending_size
        waiting = range(max(0, made - size), made)
        assert store.pending is not None
        places = [slot % size for slot in waiting]
        store.pending[row][:, places] = store.slots.read(slice(waiting.start, made))[row]


@torch.no_grad()
def expand(layout: Layout, row: int, state: RowState, device: torch.device) -> None:
    """Make those expanded slots of a row that it came without."""
    rotations: dict[Any, Rotation] = {}
    for layer in layout.to_rebuild(state.seen_tokens, state.tensors):
        store, fold, schedule = layout.follows(layer), layer.fold, layer.schedule
        assert store is not None
        count = schedule.slots(state.seen_tokens)
        codes = store.slots.read(slice(0, count))[row : row + 1]
        places = StoredSlots(schedule, range(count), fold.pipeline.slot_position, device)
        if places.key not in rotations:
            rotations[places.key] = layout.attachment.rotation_of(places)
        made = fold.unfold(codes, rotations[places.key])
        shown = slice(layer.exact_places, layer.exact_places + count)
        for buffer, slots in zip((layer.keys, layer.values), made, strict=True):
            buffer[row, :, shown] = slots[0]
