"""Tensors that grow by whole blocks, so that a decode step copies nothing it need not."""

from __future__ import annotations

from torch import Tensor

BLOCK = 64
"""Slots that a full buffer grows by: at most this much memory is unused."""


def rounded(slots: int) -> int:
    """Slots allocated for so many in use."""
    return -(-slots // BLOCK) * BLOCK


def grown(buffer: Tensor, fixed: int, slots: int) -> Tensor:
    """The buffer, or a longer copy of it, with room for `fixed` places and `slots` slots.

    buffer: (batch, heads, places, width).
    """
    needed = fixed + rounded(slots)
    if buffer.shape[2] >= needed:
        return buffer
    longer = buffer.new_zeros(buffer.shape[0], buffer.shape[1], needed, buffer.shape[3])
    longer[:, :, : buffer.shape[2]] = buffer
    return longer


def refitted(buffer: Tensor, fixed: int, places: int) -> Tensor:
    """The buffer, or a copy with `places` places in front of its slots instead of `fixed`.

    buffer: (batch, heads, places, width). New places are zeros; lost ones are those nearest to the
    slots.
    """
    if fixed == places:
        return buffer
    batch, heads, whole, width = buffer.shape
    made = buffer.new_zeros(batch, heads, places + whole - fixed, width)
    kept = min(fixed, places)
    made[:, :, :kept] = buffer[:, :, :kept]
    made[:, :, places:] = buffer[:, :, fixed:]
    return made
