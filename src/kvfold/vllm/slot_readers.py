"""Slots of one request as a layer reads them: rebuilt, or with values absorbed.

Rebuilt, every slot's code becomes keys and values of the layer. Absorbed, its code is summed in
place of its values, and the sums are mapped once for each query: with few queries, as in decoding,
that is far less work. Keys are rebuilt either way: RoPE turns each by another angle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.methods.base import AffineMap
from kvfold.runtime.absorbing import mapped_sums, with_ones
from kvfold.vllm.attend import KeysValues

if TYPE_CHECKING:
    from kvfold.vllm.fold import Code, Folding
    from kvfold.vllm.folded_attention import FoldedAttention


@dataclass(frozen=True)
class SlotReader:
    """Reads slots of one request as keys and values of one layer."""

    folding: Folding
    code: Code
    stand_in: FoldedAttention
    request: int

    @property
    def rotated(self) -> bool:
        """Whether codes stay in the basis that they are quantised in."""
        return False

    def __call__(self, numbers: range) -> KeysValues:
        """Keys and values of these slots."""
        slots, codes = self.codes(numbers)
        keys, values = self.code.pipeline.depth.decode(self.stand_in.index, codes[None])
        return KeysValues(self.finished(keys[0], slots), self.stand_in.local.own(values[0]))

    def codes(self, numbers: range) -> tuple[Tensor, Tensor]:
        """Slots' numbers (n,) and codes (n, code_width)."""
        code = self.code
        assert code.history is not None
        device = code.history.kv_cache.device
        slots = torch.arange(numbers.start, numbers.stop, device=device)
        rows = code.history.read(self.request, slots + code.first_number, code.columns)
        return slots, code.packed.unpack(rows, rotated=self.rotated)

    def finished(self, flat: Tensor, slots: Tensor) -> Tensor:
        """k_norm and RoPE: all heads' keys (n, width) to this device's, (kv_heads, n, head_dim)."""
        code, stand_in = self.code, self.stand_in
        keys = stand_in.local.own(flat)
        if stand_in.has_k_norm:
            keys = stand_in.attention().k_norm(keys.contiguous())
        place = code.pipeline.slot_position
        first = code.schedule.anchors + (int(place) if place == int(place) else place)
        rotation = self.folding.rotary.at(code.schedule.group * slots + first, keys)
        return rotation.turn(keys[None])[0]


@dataclass(frozen=True)
class AbsorbingReader(SlotReader):
    """Reads slots of one request as keys of one layer and codes in place of values.

    key_map: of codes as they are stored, see `stored_map`. value_map: of codes.
    """

    key_map: AffineMap
    value_map: AffineMap

    @property
    def rotated(self) -> bool:
        """Whether codes stay in the basis that they are quantised in."""
        return self.code.pipeline.bits is not None

    def __call__(self, numbers: range) -> KeysValues:
        """Keys of these slots, and their codes with a one behind each."""
        slots, codes = self.codes(numbers)
        keys = functional.linear(codes, *self.key_map)
        return KeysValues(self.finished(keys, slots), with_ones(codes)[None])

    def values(self, summed: Tensor) -> Tensor:
        """Sums of codes, (kv_heads, grouped, code_width + 1), to sums of values."""
        local = self.stand_in.local
        weight, bias = local.own(self.value_map.weight.T), local.own(self.value_map.bias[None])
        return mapped_sums(self.code.pipeline, summed, weight, bias, rotated=self.rotated)
