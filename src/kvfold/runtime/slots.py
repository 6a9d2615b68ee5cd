"""Where slots are kept: as they are, or quantised. Both grow by blocks and keep slots in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvfold.methods import Bits, CodePart
from kvfold.methods.turboquant import Quantised, TurboQuant
from kvfold.runtime.buffers import grown
from kvfold.runtime.schedule import Write


class SlotStore:
    """Vectors of slots, (batch, heads, slots, width), in the model's dtype or quantised.

    codec: how to quantise, None to keep them as they are. Nothing else is kept: with a codec
    there is no float copy.
    """

    def __init__(self, codec: TurboQuant | None = None) -> None:
        self.codec = codec
        self.values: Tensor | None = None
        self.scales: Tensor | None = None
        self.dtype = torch.float32
        self._finite: Tensor | None = None

    def take_finite(self) -> Tensor | None:
        """Whether all that was quantised since the last call was finite: a 0-dim bool tensor."""
        finite, self._finite = self._finite, None
        return finite

    def is_too_large(self) -> bool:
        """Whether the scale of a slot is more than can be stored; waits for the device."""
        return self.scales is not None and bool(torch.isinf(self.scales).any())

    def write(self, write: Write | None, values: Tensor, needed: int) -> None:
        """Put values (batch, heads, n, width) where `write` says; room for `needed` slots."""
        self.dtype = values.dtype
        if self.codec is None:
            self.values = _put(self.values, write, values, needed)
            return
        made = self.codec.encode(values)
        self._finite = torch.isfinite(made.scales).all()
        self.values = _put(self.values, write, made.codes, needed)
        self.scales = _put(self.scales, write, made.scales, needed)

    def read(self, slots: slice) -> Tensor:
        """Slots as they were written, up to quantisation: (batch, heads, n, width)."""
        assert self.values is not None
        if self.codec is None:
            return self.values[:, :, slots]
        return self.codec.decode(self.quantised(slots), dtype=self.dtype)

    def read_rotated(self, slots: slice) -> Tensor:
        """Slots in the codec's rotated basis, which spares a transform of the history."""
        assert self.codec is not None
        return self.codec.decode_rotated(self.quantised(slots), dtype=self.dtype)

    def quantised(self, slots: slice) -> Quantised:
        """Codes and scales of some slots."""
        assert self.codec is not None and self.values is not None and self.scales is not None
        codes, scales = self.values[:, :, slots], self.scales[:, :, slots]
        return Quantised(codes, scales, self.codec.signature)

    def tensors(self) -> dict[str, Tensor]:
        """What is held, by what it is."""
        owned = {"values": self.values, "scales": self.scales}
        return {name: tensor for name, tensor in owned.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what `change` makes of it."""
        for name, tensor in self.tensors().items():
            setattr(self, name, change(tensor))

    def copied(self) -> SlotStore:
        """A store with tensors of its own."""
        made = SlotStore(self.codec)
        made.__dict__.update(self.__dict__)
        made.map(torch.clone)
        return made


def _put(buffer: Tensor | None, write: Write | None, values: Tensor, needed: int) -> Tensor:
    if buffer is None:
        buffer = values.new_zeros(values.shape[0], values.shape[1], 0, values.shape[3])
    buffer = grown(buffer, 0, needed)
    if write is not None:
        write.apply(buffer, values)
    return buffer


class CodeSlots:
    """Slots of one code, (batch, 1, slots, code_width): whole, or quantised part by part."""

    def __init__(self, parts: Sequence[CodePart], bits: Bits | None) -> None:
        self.parts = list(parts) if bits is not None else []
        self.stores = (
            [SlotStore()]
            if bits is None
            else [SlotStore(TurboQuant(part.width, bits.of(part), bits.seed)) for part in parts]
        )

    @property
    def quantised(self) -> bool:
        """Whether codes are kept in few bits, and so in a rotated basis."""
        return bool(self.parts)

    def write(self, write: Write | None, codes: Tensor, needed: int) -> None:
        """Put codes (batch, 1, n, code_width) where `write` says."""
        if not self.parts:
            self.stores[0].write(write, codes, needed)
            return
        start = 0
        for part, store in zip(self.parts, self.stores, strict=True):
            stop = start + part.heads * part.width
            vectors = codes[:, 0, :, start:stop].reshape(*codes.shape[::2], part.heads, part.width)
            store.write(write, vectors.transpose(1, 2), needed)
            start = stop

    def read(self, slots: slice) -> Tensor:
        """Codes of some slots: (batch, 1, n, code_width)."""
        if not self.parts:
            return self.stores[0].read(slots)
        pieces = [store.read(slots).transpose(1, 2).flatten(2) for store in self.stores]
        return torch.cat(pieces, dim=-1)[:, None]

    def read_rotated(self, slots: slice) -> Tensor:
        """Quantised codes of some slots in the basis that they are stored in.

        See `Pipeline.rotated`.
        """
        pieces = [store.read_rotated(slots).transpose(1, 2).flatten(2) for store in self.stores]
        return torch.cat(pieces, dim=-1)[:, None]

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what `change` makes of it."""
        for store in self.stores:
            store.map(change)

    def copied(self) -> CodeSlots:
        """A store with tensors of its own."""
        made = CodeSlots.__new__(CodeSlots)
        made.parts = self.parts
        made.stores = [store.copied() for store in self.stores]
        return made
