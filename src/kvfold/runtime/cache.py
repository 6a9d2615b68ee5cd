"""The folded cache: exact anchors and window per layer, codes per method, nothing else.

A `FoldedCache` is a transformers `Cache`, so `generate`, beams and batches work with it. Layers
that the plan leaves alone keep transformers' own cache layers. The attention of a folded layer
never calls `update`: an `Attachment` opens a `Step` on the cache, its layers read and write their
stores, and the step is committed when the forward has ended.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvfold.errors import CacheError
from kvfold.methods import DepthMethod, Source
from kvfold.runtime.codes import CodeStore
from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.layer import FoldedAttention
from kvfold.runtime.ledger import Ledger
from kvfold.runtime.schedule import Schedule, Step


class FoldedCache(Cache):
    """The cache of a model with an add-on attached; made by `Attachment.new_cache`.

    folds: the folded layers. config: of the model. given: codes per method to use instead of
    computing them (two-pass scoring), each (batch, 1, tokens, code_width).
    """

    layers: list[Any]

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
        self.config = config
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
        layer = self.layers[index]
        assert isinstance(layer, FoldedLayer)
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
        if self.given is not None and self.recorded is None:
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

        rotary: positions (rows, seq) -> their rotation.
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
        rotation = rotary(step.exit_positions)
        for layer in self.layers:
            if isinstance(layer, FoldedLayer) and layer.fold.method.code_width:
                codes = self.stores[id(layer.fold.method)].exits(step)
                layer.write_slots(step, codes, rotation)

    def __deepcopy__(self, memo: dict[int, Any]) -> FoldedCache:
        """A cache with tensors of its own on the same attachment; the model is not copied."""
        made = FoldedCache.__new__(FoldedCache)
        memo[id(self)] = made
        made.__dict__.update(self.__dict__)
        made.rows = list(self.rows)
        made.stores = {key: store.copied() for key, store in self.stores.items()}
        made.layers = [
            layer.copied() if isinstance(layer, FoldedLayer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return made

    def nbytes(self) -> Ledger:
        """Bytes of every storage that the cache holds, by component."""
        return Ledger.of_cache(self)

    def _select(self, index: Tensor) -> None:
        for store in self.stores.values():
            store.select_rows(index)
        self.rows = [self.rows[i] for i in index.tolist()]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams: row i becomes row beam_idx[i]."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

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
        """Forget everything. Unfolded layers are made anew: older releases only zero theirs."""
        for index, layer in enumerate(DynamicCache(config=self.config).layers):
            if index in self.folded:
                self.layers[index].reset()
            else:
                self.layers[index] = layer
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
