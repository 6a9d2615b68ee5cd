"""The folded model over whole rows at once, differentiable in an add-on's weights.

What an attached model computes token by token on a cache, this computes in one dense pass without
one: a query's exact tokens and its slots are picked by a mask. Teacher and student share the
weights of the base; layers below the first that an add-on touches compute the same in both, so
they run once, in the teacher's pass, which hands on what the student needs of it.

Codes that exist only after their own layers have run (a latent code of a group's own keys and
values) are made of the teacher's activations, as after an exact prefill: a token's code can't
come from a pass that needs it. All others are made of the student's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kvfold.anatomy import Anatomy, require_plain, rotary, text_decoder
from kvfold.methods import Activations, Pipeline, Source
from kvfold.plan import Plan
from kvfold.runtime.layer import FoldedAttention, Rotation, folded_layers
from kvfold.runtime.reading import choose_readings
from kvfold.runtime.reference import reference_mask
from kvfold.runtime.schedule import Schedule

QUERY_BLOCK = 256
"""Queries that share a mask, so that no query is multiplied with far more keys than it sees."""


class _Block(NamedTuple):
    """A block of queries, which exact tokens and how many slots it may see, and its mask.

    mask: (1, 1, queries, exact tokens + slots) bool.
    """

    queries: slice
    exact: list[slice]
    slots: int
    mask: Tensor


class Student:
    """A plain model that, inside `running()`, folds its history by a plan while it runs.

    model: plain and frozen. pipelines: the plan's, in float32 (or the dtype the model has), with
    gradients where wanted. below: the first layer of the add-on, if one below all folded layers
    has weights of the add-on too. checkpoint_layers: keep only each layer's input for the backward
    pass and compute the rest again.
    """

    def __init__(
        self,
        model: Any,
        shape: Anatomy,
        plan: Plan,
        pipelines: Iterable[nn.Module],
        *,
        below: int | None = None,
        checkpoint_layers: bool = False,
    ) -> None:
        self.model, self.shape, self.plan = model, shape, plan
        self.decoder = text_decoder(model)
        self.pipelines = [p for p in pipelines if isinstance(p, Pipeline)]
        readings = choose_readings(plan, self.pipelines, shape, free_bytes=None, element_size=4)
        folds = folded_layers(model, shape, self.pipelines, readings)
        self.folds = {fold.index: fold for fold in folds}
        starts = [*self.folds, *([] if below is None else [below])]
        self.first = min(starts, default=0)
        self.checkpoint_layers = checkpoint_layers
        self._fed_by: dict[Source, list[Pipeline]] = {}
        for pipeline in self.pipelines:
            if not self._lags(pipeline):
                for source in pipeline.inputs:
                    self._fed_by.setdefault(source, []).append(pipeline)
        self._window = plan.window
        self._activations: dict[Source, Tensor] = {}
        self._codes: dict[int, Tensor] = {}
        self._blocks: dict[tuple[int, int], list[_Block]] = {}
        self._rotations: dict[tuple[int, float], Rotation] = {}

    @staticmethod
    def _lags(pipeline: Pipeline) -> bool:
        return pipeline.depth.needs_window and pipeline.depth.code_width > 0

    @property
    def lags(self) -> bool:
        """Whether some codes are made of activations that a call is given, not of its own."""
        return any(self._lags(pipeline) for pipeline in self.pipelines)

    def _is_below(self, source: Source) -> bool:
        """Whether an activation comes up before the first layer that student and teacher differ
        in, or as its input.
        """
        return source.layer < self.first or source == self.start

    @property
    def start(self) -> Source:
        """The hidden state that the student begins with."""
        return Source("hidden", self.first)

    @property
    def sources(self) -> frozenset[Source]:
        """What a call needs of the teacher's pass (see `kvfold.runtime.capture.plain_pass`)."""
        lagging = {s for p in self.pipelines if self._lags(p) for s in p.inputs}
        return frozenset({self.start} | lagging | {s for s in self._fed_by if self._is_below(s)})

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put the folded forwards in place of the model's; all is restored at the end.

        Keep it open around the backward pass too where layers are checkpointed.
        """
        require_plain(self.model)
        replaced: list[nn.Module] = []
        hooks: list[Any] = []

        def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
            replaced.append(module)
            module.forward = forward

        try:
            for index, layer in enumerate(self.decoder.layers):
                if index < self.first:
                    replace(layer, _handed_on)
                elif self.checkpoint_layers:
                    replace(layer, _checkpointed(layer.forward))
            for fold in self.folds.values():
                replace(fold.module, self._attention(fold))
            for source in self._fed_by:
                if source.kind == "hidden" and not self._is_below(source):
                    layer = self.decoder.layers[source.layer]
                    hook = self._publishing(source)
                    hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module in replaced:
                del module.forward
            self._forget()

    def __call__(self, found: Activations, *, window: int | None = None) -> Tensor:
        """Final hidden states, (batch, seq, hidden), after the final norm; in `running()` only.

        found: the teacher's activations of `sources`, of rows without padding. window: in place of
        the plan's.
        """
        self._forget()
        self._window = self.plan.window if window is None else window
        for pipeline in self.pipelines:
            if self._lags(pipeline):
                self._make_slots(pipeline, {s: self._wide(found[s]) for s in pipeline.inputs})
        self._publish({source: found[source] for source in self._fed_by if self._is_below(source)})
        hidden = found[self.start]
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        output = self.decoder(
            inputs_embeds=hidden,
            position_ids=positions.expand(hidden.shape[0], -1),
            use_cache=False,
        )
        final: Tensor = output.last_hidden_state
        return final

    def _forget(self) -> None:
        self._activations, self._codes = {}, {}
        self._blocks, self._rotations = {}, {}

    def _publish(self, found: Mapping[Source, Tensor]) -> None:
        """Take activations, and make the slots of every pipeline that they complete."""
        self._activations.update({source: self._wide(x) for source, x in found.items()})
        fed = {id(p): p for source in found for p in self._fed_by.get(source, ())}
        for pipeline in fed.values():
            if all(source in self._activations for source in pipeline.inputs):
                self._make_slots(pipeline, self._activations)

    def _make_slots(self, pipeline: Pipeline, activations: Activations) -> None:
        records = pipeline.records(activations)
        self._codes[id(pipeline)] = pipeline.whole_slots(records, self.plan.anchors)

    def _wide(self, x: Tensor) -> Tensor:
        """An activation in the dtype that the add-on is trained in."""
        return x if x.element_size() >= 4 else x.float()

    def _publishing(self, source: Source) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._publish({source: args[0] if args else kwargs["hidden_states"]})

        return hook

    def _attention(self, fold: FoldedAttention) -> Callable[..., Any]:
        own = {kind: Source(kind, fold.index) for kind in ("inputs", "keys", "values")}

        def forward(
            hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
        ) -> tuple[Tensor, None]:
            made = fold.family.project(fold.module, hidden_states)
            found = {own["inputs"]: hidden_states}
            found[own["keys"]] = made.keys.transpose(1, 2).flatten(2)
            found[own["values"]] = made.values.transpose(1, 2).flatten(2)
            self._publish({source: x for source, x in found.items() if source in self._fed_by})
            rotation = Rotation.of(*position_embeddings)
            queries = fold.finish_queries(made.queries, rotation)
            keys = fold.finish_keys(made.keys, rotation)
            mixed = self._attend(fold, queries, keys, made.values)
            mixed = mixed.transpose(1, 2).flatten(2)
            if made.gate is not None:
                mixed = mixed * torch.sigmoid(made.gate)
            return fold.module.o_proj(mixed), None

        return forward

    def _slots(self, fold: FoldedAttention) -> tuple[Tensor, Tensor] | None:
        """A layer's slots, ready for attention: two of (batch, kv_heads, slots, head_dim)."""
        codes = self._codes.get(id(fold.pipeline))
        if codes is None or codes.shape[1] == 0:
            return None
        pipeline = fold.pipeline
        if fold.reading != "expanded":
            codes = pipeline.rounded_codes(codes)
        keys, values = fold.unfold(codes[:, None], self._slot_rotation(pipeline, codes))
        return (
            pipeline.rounded_heads(keys, values) if fold.reading == "expanded" else (keys, values)
        )

    def _slot_rotation(self, pipeline: Pipeline, codes: Tensor) -> Rotation:
        key = pipeline.group, pipeline.slot_position
        if key not in self._rotations:
            numbers = torch.arange(codes.shape[1], device=codes.device)
            places = (pipeline.group * numbers + self.plan.anchors + pipeline.slot_position)[None]
            like = torch.empty(0, dtype=codes.dtype, device=codes.device)
            made = rotary(self.model, self.shape.family, places, like)
            self._rotations[key] = Rotation.of(*made)
        return self._rotations[key]

    def _attend(
        self, fold: FoldedAttention, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Output over anchors, window and slots: (batch, heads, seq, head_dim)."""
        slots = self._slots(fold)
        batch, heads, _, width = queries.shape
        bias = fold.slot_bias() if slots is not None else None
        outputs = []
        for block in self._blocks_of(fold.pipeline.group, queries, slots is not None):
            near_keys = [keys[:, :, part] for part in block.exact]
            near_values = [values[:, :, part] for part in block.exact]
            if slots is not None:
                near_keys.append(slots[0][:, :, : block.slots].to(keys.dtype))
                near_values.append(slots[1][:, :, : block.slots].to(values.dtype))
            # Query heads of a kv head as its queries: no copies of keys, and quicker on a CPU.
            grouped = queries[:, :, block.queries].reshape(batch, keys.shape[1], -1, width)
            mixed = functional.scaled_dot_product_attention(
                grouped,
                torch.cat(near_keys, dim=2),
                torch.cat(near_values, dim=2),
                attn_mask=_grouped(block, bias, heads, keys.shape[1]),
                scale=fold.scaling,
            )
            # Not a view: on a GPU, heads of the output may lie behind its queries in memory.
            outputs.append(mixed.reshape(batch, heads, -1, width))
        return torch.cat(outputs, dim=2)

    def _blocks_of(self, group: int, queries: Tensor, with_slots: bool) -> list[_Block]:
        key = (group, int(with_slots))
        if key not in self._blocks:
            schedule = Schedule(self.plan.anchors, self._window, group)
            seq, device = queries.shape[2], queries.device
            self._blocks[key] = [
                _block(schedule, start, min(start + QUERY_BLOCK, seq), with_slots, device)
                for start in range(0, seq, QUERY_BLOCK)
            ]
        return self._blocks[key]


def _handed_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _checkpointed(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(own, *args, use_reentrant=False, **kwargs)

    return forward


def _block(
    schedule: Schedule, start: int, stop: int, with_slots: bool, device: torch.device
) -> _Block:
    anchors = min(schedule.anchors, stop)
    first = max(anchors, schedule.folded_until(start + 1))
    slots = schedule.slots(stop) if with_slots else 0
    positions = torch.arange(start, stop, device=device)
    mask = reference_mask(
        positions,
        stop,
        slots,
        anchors=schedule.anchors,
        window=schedule.window,
        group=schedule.group,
    )
    exact = [part for part in (slice(0, anchors), slice(first, stop)) if part.stop > part.start]
    kept = [mask[:, part] for part in exact] + [mask[:, stop:]]
    return _Block(slice(start, stop), exact, slots, torch.cat(kept, dim=1)[None, None])


def _grouped(block: _Block, bias: Tensor | None, heads: int, kv_heads: int) -> Tensor:
    """A block's mask for queries grouped by kv head, with the bias of slots if there is one."""
    shared_by = heads // kv_heads
    if bias is None or block.slots == 0:
        return block.mask.repeat(1, 1, shared_by, 1)
    seen = torch.zeros(block.mask.shape, dtype=bias.dtype, device=bias.device)
    seen = seen.masked_fill(~block.mask, -torch.inf)
    near, far = seen[..., : -block.slots], seen[..., -block.slots :]
    by_head = torch.cat([near.expand(1, heads, -1, -1), far + bias[None, :, None, None]], dim=-1)
    return by_head.reshape(1, kv_heads, -1, seen.shape[-1])
