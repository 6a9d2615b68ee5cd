"""What a folded cache keeps for one layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvfold.errors import CacheError
from kvfold.runtime.buffers import grown
from kvfold.runtime.layer import FoldedAttention, Rotation
from kvfold.runtime.schedule import Schedule, Step


class FoldedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One folded layer's exact keys and values and, where expanded, its slots.

    keys, values: (batch, kv_heads, A + R [+ slots], head_dim), post-norm and post-RoPE. Where
    keys are absorbed, `rotary` (batch, kv_heads, slots, rotary_dim) holds the rotated part of
    each slot's key and `rho` (batch, kv_heads, slots, 1) its k_norm scale.
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
        self.rotary: Tensor | None = None
        self.rho: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the exact places; key_states, value_states: (batch, kv_heads, seq, dim)."""
        batch, heads, _, width = key_states.shape
        size = self.schedule.exact_size
        self.keys = key_states.new_zeros(batch, heads, size, width)
        self.values = value_states.new_zeros(batch, heads, size, width)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def prepare(self, keys: Tensor, values: Tensor) -> None:
        """Allocate, if nothing is yet, for keys and values like these."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)

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

    def write_slots(self, step: Step, codes: Tensor, rotation: Rotation) -> None:
        """Expand the step's exits: codes (batch, 1, exits, code_width)."""
        fixed = self.schedule.exact_size
        needed = max(span.stop for span in step.exits)
        if self.fold.reading == "expanded":
            keys, values = self.fold.unfold(codes, rotation)
            self.keys = grown(self.keys, fixed, needed)
            self.values = grown(self.values, fixed, needed)
            write = step.slot_write(fixed)
            if write is not None:
                write.apply(self.keys, keys)
                write.apply(self.values, values)
        elif self.fold.absorbs_keys():
            self._write_rotary(step, codes, rotation, needed)

    def _write_rotary(self, step: Step, codes: Tensor, rotation: Rotation, needed: int) -> None:
        flat, _ = self.fold.method.decode(self.fold.index, codes[:, 0])
        keys = self.fold.heads(flat)
        rho, _ = self.fold.key_scales(keys)
        turned = self.fold.finish_keys(keys, rotation)[..., : self.fold.anatomy.rotary_dim]
        write = step.slot_write(0)
        if self.rotary is None:
            self.rotary = turned[:, :, :0]
            self.rho = None if rho is None else rho[:, :, :0]
        self.rotary = grown(self.rotary, 0, needed)
        if rho is not None and self.rho is not None:
            self.rho = grown(self.rho, 0, needed)
        if write is not None:
            write.apply(self.rotary, turned)
            if rho is not None and self.rho is not None:
                write.apply(self.rho, rho)

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

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the layer owns, by component (`places` holds several)."""
        owned = {"keys": self.keys, "values": self.values, "rotary": self.rotary, "rho": self.rho}
        return {name: tensor for name, tensor in owned.items() if tensor is not None}

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.index_select(0, index.to(tensor.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams: row i becomes row beam_idx[i]."""
        self.select_rows(beam_idx)

    def copied(self) -> FoldedLayer:
        """A layer with tensors of its own."""
        made = FoldedLayer(self.fold, self.schedule)
        made.__dict__.update(self.__dict__)
        for name, tensor in self.tensors().items():
            setattr(made, name, tensor.clone())
        return made

    def reset(self) -> None:
        """Forget everything, storage included."""
        self.keys = self.values = self.rotary = self.rho = None
        self.is_initialized = False
        self.columns = 0
