"""The folded cache: exact anchors and window per layer, codes per method, nothing else.

A `FoldedCache` is a transformers `Cache`, so `generate`, beams and batches work with it. Layers
that the plan leaves alone keep transformers' own cache layers. The attention of a folded layer
never calls `update`: an `Attachment` opens a `Step` on the cache, its layers read and write their
stores, and the step is committed when the forward has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from kvfold.errors import CacheError
from kvfold.methods import DepthMethod, Source
from kvfold.runtime.buffers import grown
from kvfold.runtime.layer import FoldedAttention
from kvfold.runtime.ledger import Ledger
from kvfold.runtime.schedule import Schedule, Step


class FoldedLayer(CacheLayerMixin):
    """One folded layer's exact keys and values and, where expanded, its slots.

    keys, values: (batch, kv_heads, A + R [+ slots], head_dim), post-norm and post-RoPE. Where
    keys are absorbed, `rotary` (batch, kv_heads, slots, rotary_dim) holds the rotated part of
    each slot's key and `rho` (batch, kv_heads, slots, 1) its k_norm scale.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, fold: FoldedAttention, schedule: Schedule) -> None:
        super().__init__()
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

    def write_slots(self, step: Step, codes: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Expand the step's exits: codes (batch, 1, exits, code_width), cos and sin theirs."""
        fixed = self.schedule.exact_size
        needed = max(span.stop for span in step.exits)
        if self.fold.reading == "expanded":
            keys, values = self.fold.unfold(codes, cos, sin)
            self.keys = grown(self.keys, fixed, needed)
            self.values = grown(self.values, fixed, needed)
            write = step.slot_write(fixed)
            if write is not None:
                write.apply(self.keys, keys)
                write.apply(self.values, values)
        elif self.fold.absorbs_keys():
            self._write_rotary(step, codes, cos, sin, needed)

    def _write_rotary(
        self, step: Step, codes: Tensor, cos: Tensor, sin: Tensor, needed: int
    ) -> None:
        flat, _ = self.fold.method.decode(self.fold.index, codes[:, 0])
        keys = self.fold.heads(flat)
        rho, _ = self.fold.key_scales(keys)
        turned = self.fold.finish_keys(keys, cos, sin)[..., : self.fold.anatomy.rotary_dim]
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

    def reset(self) -> None:
        """Forget everything, storage included."""
        self.keys = self.values = self.rotary = self.rho = None
        self.is_initialized = False
        self.columns = 0


class CodeStore:
    """The codes of one method: all of them if some layer reads codes, else only the pending.

    keep: whether readings need the codes themselves (`shared` or `absorbed`). Kept codes are
    (batch, 1, tokens after the anchors, code_width) in order; pending ones are a ring of R
    places, position p at (p - A) mod R.
    """

    def __init__(self, method: DepthMethod, schedule: Schedule, *, keep: bool) -> None:
        self.method = method
        self.schedule = schedule
        self.keep = keep
        self.codes: Tensor | None = None
        self.new: Tensor | None = None

    def publish(self, step: Step, codes: Tensor) -> None:
        """Take the codes of the step's columns: (batch, 1, new, code_width)."""
        self.new = codes
        if self.codes is None:
            size = 0 if self.keep else self.schedule.ring_size
            self.codes = codes.new_zeros(codes.shape[0], 1, size, codes.shape[3])
        if self.keep and step.code_write is not None:
            longest = max(step.after) - self.schedule.anchors
            self.codes = grown(self.codes, 0, longest)
            step.code_write.apply(self.codes, codes)

    def exits(self, step: Step) -> Tensor:
        """Codes of the step's exits, (batch, 1, most_exits, code_width)."""
        ring, a = self.schedule.ring_size, self.schedule.anchors
        assert self.codes is not None
        if self.keep:
            return _gather(self.codes, [list(span) for span in step.exits], step)
        places = [
            [
                (slot % ring if slot + a < step.before[row] else ring + step._column(row, slot + a))
                for slot in span
            ]
            for row, span in zip(step.rows, step.exits, strict=True)
        ]
        if all(place < ring for row in places for place in row):
            return _gather(self.codes, places, step)
        assert self.new is not None
        return _gather(torch.cat([self.codes, self.new], dim=2), places, step)

    def commit(self, step: Step) -> None:
        """End the step: new codes join the pending ring."""
        if not self.keep and self.codes is not None and self.new is not None:
            write = step.pending_write
            if write is not None:
                write.apply(self.codes, self.new)
        self.new = None

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        if self.codes is not None:
            self.codes = self.codes.index_select(0, index.to(self.codes.device))

    def reset(self) -> None:
        """Forget everything, storage included."""
        self.codes = self.new = None


def _gather(source: Tensor, places: Sequence[Sequence[int]], step: Step) -> Tensor:
    """source (batch, 1, places, width) at the named places of each row, padded to the longest."""
    longest = max(len(row) for row in places)
    if step.uniform:
        row = places[0]
        if row[-1] - row[0] == longest - 1:
            return source[:, :, row[0] : row[-1] + 1]
        return source.index_select(2, torch.tensor(list(row), device=source.device))
    padded = [list(row) + [0] * (longest - len(row)) for row in places]
    index = torch.tensor(padded, device=source.device)[:, None, :, None]
    return source.gather(2, index.expand(-1, 1, -1, source.shape[3]))


class FoldedCache(Cache):
    """The cache of a model with an add-on attached; made by `Attachment.new_cache`.

    folds: the folded layers. config: of the model. given: codes per method to use instead of
    computing them (two-pass scoring), each (batch, 1, tokens, code_width).
    """

    def __init__(
        self,
        folds: Sequence[FoldedAttention],
        schedule: Schedule,
        config: Any,
        *,
        owner: object,
        given: dict[int, Tensor] | None = None,
    ) -> None:
        layers: list[Any] = list(DynamicCache(config=config).layers)
        for fold in folds:
            layers[fold.index] = FoldedLayer(fold, schedule)
        super().__init__(layers=layers)
        self.schedule = schedule
        self.owner = owner
        self.given = given
        self.recorded: dict[int, Tensor] | None = None
        self.columns = 0
        self.rows: list[int] = []
        self.step: Step | None = None
        self.stores: dict[int, CodeStore] = {}
        self.folded = frozenset(fold.index for fold in folds)
        for fold in folds:
            self._add_store(fold)

    def _add_store(self, fold: FoldedAttention) -> None:
        keep = fold.reading in ("shared", "absorbed")
        known = self.stores.get(id(fold.method))
        if known is not None:
            known.keep = known.keep or keep
        elif fold.method.code_width:
            self.stores[id(fold.method)] = CodeStore(fold.method, self.schedule, keep=keep)

    @property
    def seen_tokens(self) -> list[int]:
        """Real tokens seen, per row."""
        return list(self.rows)

    def folded_layer(self, index: int) -> FoldedLayer:
        """The folded cache layer of one model layer."""
        layer: FoldedLayer = self.layers[index]
        return layer

    def begin(self, step: Step, *, record: bool = False) -> None:
        """Open a step; refused if an earlier one was never committed.

        record: only keep the codes, in `recorded`.
        """
        if self.step is not None:
            raise CacheError(
                "an earlier forward with this cache failed half-way, so its contents can't be "
                "trusted; start again with a new cache"
            )
        self.step = step
        self.recorded = {} if record else None

    def publish(self, source_values: dict[Source, Tensor], method: DepthMethod) -> None:
        """Encode a method's code of this step, once all of its inputs are there."""
        step = self.step
        assert step is not None
        store = self.stores.get(id(method))
        if store is None or store.new is not None:
            return
        if self.given is not None:
            start = step.before[0]
            store.publish(step, self.given[id(method)][:, :, start : start + step.new])
        elif all(source in source_values for source in method.inputs):
            codes = method.encode(source_values)
            if step.new > 1 and not bool(torch.isfinite(codes).all()):
                raise CacheError(
                    f"the {method.name} code of layers {list(method.layers)} is not finite: the "
                    "model's activations overflow its dtype or the add-on is damaged"
                )
            if self.recorded is not None:
                self.recorded[id(method)] = codes[:, None]
            else:
                store.publish(step, codes[:, None])

    def commit(self, rotary: Any) -> None:
        """End the step: write what attention did not need yet, and count the tokens.

        rotary: positions (rows, seq) -> cos, sin.
        """
        step = self.step
        assert step is not None
        if not step.folded and self.recorded is None:
            self.expand_all(step, rotary)
        for store in self.stores.values():
            store.commit(step)
        self.columns += step.new
        self.rows = step.after
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                layer.columns = self.columns
        self.step = None

    def expand_all(self, step: Step, rotary: Any) -> None:
        """Expand the step's exits in every layer (exact prefill does it at the end)."""
        if step.most_exits == 0:
            return
        cos, sin = rotary(step.exit_positions())
        for layer in self.layers:
            if isinstance(layer, FoldedLayer) and layer.fold.method.code_width:
                codes = self.stores[id(layer.fold.method)].exits(step)
                layer.write_slots(step, codes, cos, sin)

    def nbytes(self) -> Ledger:
        """Bytes of every storage that the cache holds, by component."""
        return Ledger.of_cache(self)

    def _select(self, index: Tensor) -> None:
        for store in self.stores.values():
            store.select_rows(index)
        self.rows = [self.rows[i] for i in index.tolist()]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams: row i becomes row beam_idx[i]."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.batch_select_indices(
            torch.arange(len(self.rows)).repeat_interleave(repeats)
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        indices = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                layer.select_rows(indices)
            else:
                layer.reorder_cache(indices)
        self._select(indices)

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.reset()
        for store in self.stores.values():
            store.reset()
        self.columns, self.rows, self.step = 0, [], None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative number of them, or the length to keep.

        Raises `CacheError` where a token that has left the window would have to be exact again.
        """
        columns = self.columns
        remove = -tokens_to_remove if tokens_to_remove <= 0 else columns - tokens_to_remove
        if remove <= 0:
            return
        kept = [seen - remove for seen in self.rows]
        lost = any(
            seen > self.schedule.exact_size or short < 0
            for seen, short in zip(self.rows, kept, strict=True)
        )
        if lost:
            raise CacheError(
                f"can't crop {remove} tokens: the cache has seen {self.rows} and folded every "
                f"token beyond the first {self.schedule.exact_size}, which can't be made exact "
                "again; crop earlier, or use a plan with a larger window"
            )
        for layer in self.layers:
            if not isinstance(layer, FoldedLayer):
                layer.crop(-remove)
        self.columns, self.rows = columns - remove, kept
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                layer.columns = self.columns
