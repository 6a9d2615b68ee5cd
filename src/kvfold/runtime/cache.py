"""The folded cache: exact anchors and window per layer, codes per method, nothing else.

A `FoldedCache` is a transformers `Cache`, so `generate`, beams and batches work with it. Layers
that the plan leaves alone keep transformers' own cache layers. The attention of a folded layer
never calls `update`: an `Attachment` opens a `Step` on the cache, its layers read and write their
stores, and the step is committed when the forward has ended.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvfold.errors import CacheError
from kvfold.methods import Pipeline, Source
from kvfold.runtime.codes import CodeStore, code_store_needs
from kvfold.runtime.columns import PAD, ColumnLog
from kvfold.runtime.finite import require_all_finite, require_finite
from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.layer import FoldedAttention, RotaryAt, SlotPlaces
from kvfold.runtime.ledger import Ledger
from kvfold.runtime.schedule import Schedule, Step

StepKey = tuple[int, bool]
"""A group, and whether the layers are those that a prompt may skip."""
StepsByKey = Mapping[StepKey, Step]


@dataclass(frozen=True)
class Running:
    """One pass through some of the layers.

    steps: of every pipeline that gets tokens, also where its layers don't run. layers: those that
    run. tokens: what the cache has seen more when the pass is done, None where other passes count.
    record: only keep the records, in `recorded`.
    """

    steps: StepsByKey
    layers: range
    tokens: Step | None
    record: bool = False


class FoldedCache(Cache):
    """The cache of a model with an add-on attached; made by `Attachment.new_cache`.

    folds: the folded layers. schedules: by group. config: of the model. split: the layer from
    which on a prompt may be skipped, None without prefill skipping. given: records per pipeline to
    use instead of computing them (two-pass scoring), each (batch, 1, tokens, record_width).
    keep_codes: also of layers that need only what was made of them.
    """

    layers: list[Any]

    def __init__(
        self,
        folds: Sequence[FoldedAttention],
        schedules: Mapping[int, Schedule],
        config: Any,
        *,
        owner: object,
        split: int | None = None,
        given: dict[int, Tensor] | None = None,
        keep_codes: bool = False,
    ) -> None:
        layers: list[Any] = list(DynamicCache(config=config).layers)
        for fold in folds:
            layers[fold.index] = FoldedLayer(fold, schedules[fold.pipeline.group])
        super().__init__(layers=layers)
        self.schedules = dict(schedules)
        self.config = config
        self.owner = owner
        self.split = split
        self.given = given
        self.recorded: dict[int, Tensor] | None = None
        self.columns = 0
        self.padded_columns = 0
        self.rows: list[int] = []
        self.log = ColumnLog()
        self.running: Running | None = None
        self.half_way = False
        self._unchecked: list[tuple[Pipeline, Tensor]] = []
        self.stores: dict[int, CodeStore] = {}
        self.folded = frozenset(fold.index for fold in folds)
        readers: dict[int, list[FoldedAttention]] = {}
        for fold in folds:
            readers.setdefault(id(fold.pipeline), []).append(fold)
        for key, reading in readers.items():
            pipeline = reading[0].pipeline
            if pipeline.depth.code_width:
                keep, late = code_store_needs(reading)
                schedule = self.schedules[pipeline.group]
                spare = keep_codes and late and not keep
                self.stores[key] = CodeStore(
                    pipeline, schedule, keep=keep or spare, late=late, spare=spare
                )

    def key_of(self, pipeline: Pipeline) -> StepKey:
        """Which of the open steps is a pipeline's."""
        return pipeline.group, self.split is not None and pipeline.layers[0] >= self.split

    @property
    def steps(self) -> StepsByKey:
        """The steps of the open pass; none between passes."""
        return {} if self.running is None else self.running.steps

    def step_of(self, pipeline: Pipeline) -> Step:
        """The open step of a pipeline."""
        return self.steps[self.key_of(pipeline)]

    @property
    def seen_tokens(self) -> list[int]:
        """Real tokens seen, per row."""
        return list(self.rows)

    def folded_layer(self, index: int) -> FoldedLayer:
        """The folded cache layer of one model layer."""
        layer = self.layers[index]
        assert isinstance(layer, FoldedLayer)
        return layer

    def token_ids(self, row: int = 0) -> list[int]:
        """The tokens that a row has seen, pads left out; -2 for those that came as embeddings."""
        return [] if not self.rows else [int(n) for n in self.log.row(row)[0].tolist()]

    def attention_mask(self) -> Tensor:
        """Which columns are tokens, (rows, columns) of 0 and 1.

        The mask of a next call is this one with a column for each new token on its right.
        """
        return (self.log.table() != PAD).long()

    def restore(self, seen: Sequence[int], table: Tensor) -> None:
        """Take over what rows have seen, once their tensors are in place.

        table: the columns' ids, (rows, columns) int32, pads to the left.
        """
        self.columns, self.rows = table.shape[1], list(seen)
        self.padded_columns = self.columns - min(self.rows)
        self.log.append(table)
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                layer.columns = self.columns

    def require_whole(self) -> None:
        """Raise `CacheError` if an earlier forward never came to its end."""
        if self.running is not None or self.half_way:
            raise CacheError(
                "an earlier forward with this cache failed half-way, so its contents can't be "
                "trusted; start again with a new cache"
            )

    def begin(self, running: Running) -> None:
        """Open a pass."""
        self.running = running
        self.recorded = {} if running.record else None
        self._unchecked = []

    def publish(self, found: Mapping[Source, Tensor], pipeline: Pipeline) -> None:
        """Make a pipeline's records of this step, once all of its inputs are there.

        A step that has fewer columns than the inputs takes the first of them.
        """
        step = self.steps.get(self.key_of(pipeline))
        store = self.stores.get(id(pipeline))
        if store is None or store.published or step is None:
            return
        if self.given is not None and self.recorded is None:
            start = step.before[0]
            store.publish(step, self.given[id(pipeline)][:, :, start : start + step.new])
        elif all(source in found for source in pipeline.inputs):
            inputs = {source: found[source][:, : step.new] for source in pipeline.inputs}
            records = pipeline.records(inputs)
            if step.new > 1:
                require_finite(records, step, pipeline)
            else:
                self._unchecked.append((pipeline, records))
            if self.recorded is not None:
                self.recorded[id(pipeline)] = records[:, None]
            else:
                store.publish(step, records[:, None])

    def commit(self, rotary: RotaryAt) -> None:
        """End the pass: write what attention did not need yet, and count the tokens."""
        running = self.running
        assert running is not None
        if self.recorded is None:
            self._expand_rest(rotary)
        self._require_finite()
        for store in self.stores.values():
            if self.key_of(store.pipeline) in self.steps:
                store.commit(self.step_of(store.pipeline))
        if running.tokens is not None:
            self._count(running.tokens)
        self.running = None

    def _count(self, step: Step) -> None:
        if step.most_pads:
            self.padded_columns = self.columns + step.most_pads
        self.columns += step.new
        self.rows = step.after
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                layer.columns = self.columns

    def expand(self, layer: FoldedLayer, rotary: RotaryAt) -> None:
        """Write the slots that this step brings to a layer, where it keeps any itself."""
        fold = layer.fold
        store = self.stores.get(id(fold.pipeline))
        if store is None:
            return
        step = self.step_of(fold.pipeline)
        early = fold.expands_early
        spans = step.completed if early else step.exits
        if any(spans):
            layer.allocate(step)
            codes = store.completed(step) if early else store.exits(step)
            place = fold.pipeline.slot_position
            layer.write_slots(step, spans, codes, rotary(SlotPlaces(step, early, place)))

    def expands_in_attention(self, fold: FoldedAttention) -> bool:
        """Whether a layer's slots are written before its own attention, not after the step."""
        assert self.running is not None
        made_later = fold.expands_early and fold.method.needs_window and self.given is None
        runs = fold.index in self.running.layers
        return runs and self.step_of(fold.pipeline).folded and not made_later

    def _expand_rest(self, rotary: RotaryAt) -> None:
        for layer in self.layers:
            if not isinstance(layer, FoldedLayer):
                continue
            has_step = self.key_of(layer.fold.pipeline) in self.steps
            if has_step and not self.expands_in_attention(layer.fold):
                self.expand(layer, rotary)

    def _require_finite(self) -> None:
        steps = [(p, self.step_of(p), records) for p, records in self._unchecked]
        stores = [
            (store.pipeline.layers, part)
            for store in self.stores.values()
            for part in store.slots.stores
        ]
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                stores += [((layer.fold.index,), part) for part in layer.stores.values()]
        require_all_finite(steps, stores, max(self.rows or [0]))

    def __deepcopy__(self, memo: dict[int, Any]) -> FoldedCache:
        """A cache with tensors of its own on the same attachment; the model is not copied."""
        made = FoldedCache.__new__(FoldedCache)
        memo[id(self)] = made
        made.__dict__.update(self.__dict__)
        made.rows = list(self.rows)
        made.log = self.log.copied()
        made._unchecked = []
        made.stores = {key: store.copied() for key, store in self.stores.items()}
        made.layers = [
            layer.copied() if isinstance(layer, FoldedLayer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return made

    def forget_spare_codes(self) -> None:
        """Let go of codes that only snapshots would need; none can be made of this cache then."""
        for store in self.stores.values():
            store.forget_spare()

    def nbytes(self) -> Ledger:
        """Bytes of every storage that the cache holds, by component."""
        return Ledger.of_cache(self)

    def _select(self, index: Tensor) -> None:
        for store in self.stores.values():
            store.map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))
        self.log.select(index)
        if self.rows:
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
        self.columns, self.padded_columns, self.rows = 0, 0, []
        self.log = ColumnLog()
        self.running, self.half_way = None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative number of them, or the length to keep.

        Raises `CacheError` where a token that has left the window would have to be exact again.
        """
        columns = self.columns
        remove = -tokens_to_remove if tokens_to_remove <= 0 else columns - tokens_to_remove
        if remove <= 0:
            return
        kept = [seen - remove for seen in self.rows]
        self._refuse_uncroppable(remove)
        for schedule in self.schedules.values():
            self._refuse_crop(schedule, remove, kept)
        for layer in self.layers:
            if not isinstance(layer, FoldedLayer):
                layer.crop(-remove)
        self.columns, self.rows = columns - remove, kept
        self.log.crop(self.columns)
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                layer.columns = self.columns

    def _refuse_uncroppable(self, remove: int) -> None:
        if 0 < self.columns - remove < self.padded_columns:
            raise CacheError(
                f"can't crop {remove} columns: some of them are pads of some rows, which would "
                f"then lose other tokens than the rest; the last pad is in column "
                f"{self.padded_columns - 1} of {self.columns}; crop less, or row by row"
            )
        for index, layer in enumerate(self.layers):
            if index in self.folded:
                continue
            window = getattr(layer, "sliding_window", None)
            if window is not None and self.columns < window:
                continue
            if window is not None or not getattr(layer, "is_croppable", True):
                raise CacheError(
                    f"can't crop {remove} tokens: layer {index} keeps a recurrent state or a "
                    "sliding window that has moved on, neither of which can go back; start again "
                    "with a new cache"
                )

    def _refuse_crop(self, schedule: Schedule, remove: int, kept: list[int]) -> None:
        if any(
            seen > schedule.exact_size or short < 0
            for seen, short in zip(self.rows, kept, strict=True)
        ):
            raise CacheError(
                f"can't crop {remove} tokens: the cache has seen {self.rows} and folded every "
                f"token beyond the first {schedule.exact_size}, which can't be made exact "
                "again; crop earlier, or use a plan with a larger window"
            )
        if any(
            schedule.made(seen) != schedule.made(short)
            for seen, short in zip(self.rows, kept, strict=True)
            if schedule.group > 1
        ):
            raise CacheError(
                f"can't crop {remove} tokens: groups of {schedule.group} of them have been pooled "
                "already; crop before a group is full, or use a plan without a sequence axis"
            )
