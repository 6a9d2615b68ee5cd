"""What a folded cache keeps for one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvfold.errors import CacheError
from kvfold.methods.turboquant import TurboQuant
from kvfold.runtime.buffers import grown, refitted
from kvfold.runtime.layer import FoldedAttention, Rotation
from kvfold.runtime.schedule import Schedule, Step
from kvfold.runtime.slots import SlotStore

Turn = Callable[[Tensor], Tensor]


def _as_it_is(x: Tensor) -> Tensor:
    return x


class FoldedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One folded layer's exact keys and values and, where expanded, its slots.

    keys, values: (batch, kv_heads, exact_places [+ slots], head_dim), post-norm and post-RoPE.
    There are A + R exact places once so many tokens have come, fewer before where the window is
    long. Where slots are expanded and quantised they are in stores of their own, `slot_keys` and
    `slot_values`. Where keys are absorbed, `rotary` (batch, kv_heads, slots, rotary_dim) holds
    the rotated part of each slot's key and `rho` (batch, kv_heads, slots, 1) its k_norm scale.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, fold: FoldedAttention, schedule: Schedule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fold = fold
        self.schedule = schedule
        self.columns = 0
        self.exact_places = 0
        self.stores = self._new_stores()

    def _new_stores(self) -> dict[str, SlotStore]:
        """Empty stores for the slots that are not in the exact keys' buffer, by name."""
        fold, bits = self.fold, self.fold.pipeline.bits
        head_dim, rotary_dim = fold.anatomy.head_dim, fold.anatomy.rotary_dim

        def store(width: int, each: int) -> SlotStore:
            return SlotStore(None if bits is None else TurboQuant(width, each, bits.seed))

        made: dict[str, SlotStore] = {}
        if fold.reading == "expanded" and bits is not None:
            made["slot_keys"] = store(head_dim, bits.key_bits)
            made["slot_values"] = store(head_dim, bits.value_bits)
        elif fold.absorbs_keys():
            if rotary_dim:
                made["rotary"] = store(rotary_dim, 0 if bits is None else bits.key_bits)
            if fold.anatomy.k_norm != "none":
                made["rho"] = SlotStore()
        return made

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin without a place; key_states, value_states: (batch, kv_heads, seq, dim)."""
        batch, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, 0, width)
        self.values = value_states.new_zeros(batch, heads, 0, width)
        self.exact_places = 0
        self.adopt(key_states.dtype, key_states.device)

    def adopt(self, dtype: torch.dtype, device: torch.device) -> None:
        """Count as initialised, with the buffers that are there."""
        self.dtype, self.device = dtype, device
        self.is_initialized = True

    def prepare(self, step: Step, keys: Tensor, values: Tensor) -> None:
        """Make room for the exact tokens of a step that brings keys and values like these."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if step.exact_places > self.exact_places:
            self.refit(step.exact_places)

    def allocate(self, step: Step) -> None:
        """Make room for a step's tokens before the layer has made any keys and values."""
        like = self.fold.anatomy
        weight = next(self.fold.module.parameters())
        shape = (len(step.before), like.kv_heads, 0, like.head_dim)
        self.prepare(step, *[weight.new_empty(shape)] * 2)

    def refit(self, places: int) -> None:
        """Have so many exact places; slots behind them move. Those given up must be unused."""
        self.keys = refitted(self.keys, self.exact_places, places)
        self.values = refitted(self.values, self.exact_places, places)
        self.exact_places = places

    def write_anchors(self, step: Step, keys: Tensor, values: Tensor) -> None:
        """Keep the step's anchors; they are visible at once."""
        if step.anchor_write is not None:
            step.anchor_write.apply(self.keys, keys)
            step.anchor_write.apply(self.values, values)

    def write_ring(self, step: Step, keys: Tensor, values: Tensor) -> None:
        """Keep the step's last tokens, over those that have left the window."""
        if step.ring_write is not None:
            step.ring_write.apply(self.keys, keys)
            step.ring_write.apply(self.values, values)

    def write_slots(
        self, step: Step, spans: list[range], codes: Tensor, rotation: Rotation
    ) -> None:
        """Expand slots: codes (batch, 1, most, code_width), left-aligned; spans: which they are."""
        fixed = self.exact_places
        needed = max(span.stop for span in spans)
        if self.fold.absorbs_keys():
            self._write_rotary(step, spans, codes, rotation, needed)
        elif self.fold.reading == "expanded":
            keys, values = self.fold.unfold(codes, rotation)
            if "slot_keys" in self.stores:
                write = step.slot_write(spans, 0)
                self.stores["slot_keys"].write(write, keys, needed)
                self.stores["slot_values"].write(write, values, needed)
                return
            self.keys = grown(self.keys, fixed, needed)
            self.values = grown(self.values, fixed, needed)
            write = step.slot_write(spans, fixed)
            if write is not None:
                write.apply(self.keys, keys)
                write.apply(self.values, values)

    def _write_rotary(
        self, step: Step, spans: list[range], codes: Tensor, rotation: Rotation, needed: int
    ) -> None:
        flat, _ = self.fold.method.decode(self.fold.index, codes[:, 0])
        keys = self.fold.heads(flat)
        write = step.slot_write(spans, 0)
        if "rho" in self.stores:
            rho, _ = self.fold.key_scales(keys)
            assert rho is not None
            self.stores["rho"].write(write, rho, needed)
        if "rotary" in self.stores:
            turned = self.fold.finish_keys(keys, rotation)
            rotary = turned[..., : self.fold.anatomy.rotary_dim]
            self.stores["rotary"].write(write, rotary, needed)

    def rotations(self, *, quantised: bool) -> tuple[Turn, Turn]:
        """What turns vectors into the basis of quantised slots and back; nothing if there are none.

        Keys and values have the same rotation, which depends on width and seed only.
        """
        store = self.stores.get("slot_keys") if quantised else None
        if store is None or store.codec is None:
            return _as_it_is, _as_it_is
        return store.codec.rotate, store.codec.unrotate

    def visible_slots(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first slots, (batch, kv_heads, count, head_dim).

        Quantised ones are decoded in their rotated basis.
        """
        if count and "slot_keys" in self.stores:
            keys, values = self.stores["slot_keys"], self.stores["slot_values"]
            return keys.read_rotated(slice(0, count)), values.read_rotated(slice(0, count))
        shown = slice(self.exact_places, self.exact_places + count)
        return self.keys[:, :, shown], self.values[:, :, shown]

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: only an attached model can write a folded layer."""
        raise CacheError(
            f"layer {self.fold.index} of this cache is folded and can only be used by the "
            "attached model that made it; the add-on has been detached, or this is another model"
        )

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Columns seen, pads included, as in transformers' own layers."""
        return self.columns

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Sizes of the mask that transformers makes for unfolded layers."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.columns + new, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum (the name in older transformers)."""
        return -1

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that the layer owns by what `change` makes of it."""
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
        for store in self.stores.values():
            store.map(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams: row i becomes row beam_idx[i]."""
        self.map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def copied(self) -> FoldedLayer:
        """A layer with tensors of its own."""
        made = FoldedLayer(self.fold, self.schedule)
        made.__dict__.update(self.__dict__)
        made.stores = {name: store.copied() for name, store in self.stores.items()}
        if self.is_initialized:
            made.keys, made.values = self.keys.clone(), self.values.clone()
        return made

    def reset(self) -> None:
        """Forget everything, storage included."""
        self.keys = self.values = None
        self.stores = self._new_stores()
        self.is_initialized = False
        self.columns = self.exact_places = 0
