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
