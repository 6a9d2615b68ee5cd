"""Folding in a vLLM model: what stands in for its attention, and where codes are made.

Attention modules stay vLLM's own up to the point where they hand queries, keys and values over;
there a `FoldedAttention` takes them. What codes are made of is noted on the way: an attention's
projections and its input by a hook on them, hidden states by one on a layer. As soon as a
pipeline's inputs have come up, its codes are made and written, for all requests of the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context, override_forward_context

from kvfold.anatomy import Anatomy, LayerAnatomy
from kvfold.errors import UnsupportedModelError
from kvfold.methods import Pipeline, Source
from kvfold.runtime.schedule import Schedule
from kvfold.vllm.folded_attention import FoldedAttention
from kvfold.vllm.heads import LocalHeads
from kvfold.vllm.owners import PagedStep, RowLayout, RowOwner
from kvfold.vllm.packed import PackedCode
from kvfold.vllm.pages import UNIT, RowSize, fit_pages
from kvfold.vllm.passes import context_of
from kvfold.vllm.recurrent import RecurrentLayers, part_of_step
from kvfold.vllm.rotary import SlotRotary
from kvfold.vllm.scheduling import hash_unit
from kvfold.vllm.settings import Loaded

LEAST_WINDOW = 2
"""Rows of a window at least, though a plan may keep none: vLLM would free the block of the next
token of a window of 0, and shares no prefix of one of 1."""


@dataclass
class Code:
    """One pipeline's code: where its slots are, and who sees them when.

    columns: of a history row. recent_columns: of a recent row, None where nothing is pooled.
    """

    pipeline: Pipeline
    packed: PackedCode
    schedule: Schedule
    columns: slice
    recent_columns: slice | None
    history: RowOwner | None = None
    recent: RowOwner | None = None
    made: bool = False

    @property
    def first_number(self) -> int:
        """The number among history rows of slot 0: rows are counted from the row's start."""
        return -(-self.schedule.anchors // self.schedule.group)


@dataclass
class _Layouts:
    """Columns of each owner's rows, handed out from left to right."""

    widths: dict[str, int] = field(default_factory=dict)

    def take(self, owner: str, width: int) -> slice:
        start = self.widths.get(owner, 0)
        self.widths[owner] = start + width
        return slice(start, start + width)


class Folding:
    """All that folds a model: codes, owners and stand-ins; what a decoder holds as `kvfold`."""

    def __init__(
        self, decoder: Any, config: Any, loaded: Loaded, vllm_config: Any, prefix: str
    ) -> None:
        self.loaded = loaded
        self.anatomy: Anatomy = loaded.addon.base.anatomy
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.device = next(decoder.parameters()).device
        self.modules = vllm_config.compilation_config.static_forward_context
        self.activations: dict[Source, Tensor] = {}
        layouts = _Layouts()
        self.codes = [self._code(p, layouts) for p in loaded.pipelines if p.depth.code_width]
        self.layers = [
            self._stand_in(decoder.layers[layer.index].self_attn, layer, layouts)
            for layer in self.anatomy.layers
            if layer.kind == "full_attention"
        ]
        self.recurrent = RecurrentLayers.of(decoder, self.anatomy.layers)
        self.owners = self._owners(layouts, prefix, vllm_config)
        for code in self.codes:
            code.history = self.owners[_history(code.pipeline.group)]
            code.recent = self.owners["recent"] if code.recent_columns is not None else None
        self.rotary = SlotRotary(config, self.device)
        self._watch(decoder)

    def _code(self, pipeline: Pipeline, layouts: _Layouts) -> Code:
        plan, group = self.loaded.plan, pipeline.group
        packed = PackedCode(pipeline, self.dtype)
        columns = layouts.take(_history(group), packed.row_bytes)
        recent = layouts.take("recent", pipeline.record_width) if group > 1 else None
        return Code(pipeline, packed, Schedule(plan.anchors, plan.window, group), columns, recent)

    def _stand_in(self, attention: Any, layer: LayerAnatomy, layouts: _Layouts) -> FoldedAttention:
        local = LocalHeads.of(attention)
        if local.head_dim != layer.head_dim:
            raise UnsupportedModelError(
                f"vLLM's attention must have the configuration's head_dim of {layer.head_dim}; in "
                f"layer {layer.index} it has {local.head_dim}; serve it with `kvfold serve`"
            )
        plan = self.loaded.plan
        folded = layer.index in plan.folded_layers
        columns = layouts.take("exact" if folded else "whole", 2 * local.kv_width)
        del self.modules[attention.attn.layer_name]
        made = FoldedAttention(self, layer, attention, local, columns, folded=folded)
        attention.attn = made
        return made

    def _owners(self, layouts: _Layouts, prefix: str, vllm_config: Any) -> dict[str, RowOwner]:
        plan = self.loaded.plan
        tail_only = not self.loaded.codes_come_late  # parts of a step read each other's rows
        groups = [plan.group_of(layer) for layer in plan.folded_layers]
        exact = max((plan.window + group - 1 for group in groups), default=1)
        exact = max(exact, LEAST_WINDOW)
        pooled = [code.pipeline for code in self.codes if code.recent_columns is not None]
        recent = max((p.group * (2 if p.overlap else 1) for p in pooled), default=1)
        made = []
        for name, width in layouts.widths.items():
            if name == "exact":
                row = RowLayout(
                    name, width, self.dtype, window=exact, anchors=plan.anchors, tail_only=tail_only
                )
            elif name == "recent":
                row = RowLayout(name, width, self.dtype, window=recent, tail_only=tail_only)
            elif name == "whole":
                row = RowLayout(name, width, self.dtype)
            else:
                row = RowLayout(name, width, torch.uint8, tokens=int(name.split("-")[1]))
            made.append(row)
        pages = fit_pages(
            {row.name: RowSize(row.row_bytes, row.tokens, row.window is None) for row in made},
            state_bytes=self.recurrent.state_bytes(vllm_config),
            unit=2 * hash_unit(plan) if self.recurrent.modules else UNIT,
        )
        self.recurrent.share_pages(pages.page_bytes, math.lcm(*pages.tokens.values()))
        # vLLM sorts memory by the one number in a name; owners serve all layers.
        return {
            row.name: RowOwner(row, pages, f"{prefix}.layers.{number}.kvfold.{row.name}")
            for number, row in enumerate(made, self.anatomy.num_layers)
        }

    def _watch(self, decoder: Any) -> None:
        """Note what codes are made of as it comes up."""
        wanted = {source for code in self.codes for source in code.pipeline.inputs}
        for layer in sorted({s.layer for s in wanted if s.kind == "hidden"}):
            decoder.layers[layer].register_forward_pre_hook(
                _HiddenNote(self, Source("hidden", layer)), with_kwargs=True
            )
        for stand_in in self.layers:
            kinds = {s.kind for s in wanted if s.layer == stand_in.index and s.kind != "hidden"}
            if kinds:
                stand_in.attention().qkv_proj.register_forward_hook(
                    _ProjectionNote(self, stand_in, tuple(sorted(kinds)))
                )

    def parts(self) -> Iterator[Tensor | None]:
        """Rows of the step that run together, part by part; None for all at once.

        Where codes come late (after layers that read others), no query may see a slot whose
        tokens are in the same part: a part has at most the window's tokens of each request.
        """
        owner = next(iter(self.owners.values()))
        step, size = owner.step, max(1, self.loaded.plan.window)
        if step is None or not self.loaded.codes_come_late or step.longest <= size:
            self._begin()
            yield None
            return
        longest = step.longest
        try:
            for first in range(0, longest, size):
                rows = torch.empty(0)
                for one in self.owners.values():
                    one.part = None
                    assert one.step is not None
                    one.part, rows = one.step.part(first, size)
                self._begin()
                with self._recurrent_part(first, size):
                    yield rows
        finally:
            for one in self.owners.values():
                one.part = None

    def _recurrent_part(self, first: int, size: int) -> AbstractContextManager[None]:
        """In which recurrent layers, which attend to nothing of ours, run on a part of the step."""
        if not self.recurrent.modules:
            return nullcontext()
        context = get_forward_context()
        starts, seen = self.recurrent.step(context)
        if first == 0:
            lengths = [stop - start for start, stop in itertools.pairwise(starts)]
            begun = [n for n, length in enumerate(lengths) if length == seen[n]]
            self.recurrent.clear(context, begun)
        part = part_of_step(starts, seen, first, size)
        inside: AbstractContextManager[None] = override_forward_context(
            context_of(context, part, recurrent=self.recurrent.names)
        )
        return inside

    def _begin(self) -> None:
        """Forget what came before."""
        self.activations = {}
        for code in self.codes:
            code.made = False

    def note(self, source: Source, activation: Tensor) -> None:
        """Take an activation (tokens, width); make the codes that have waited for it."""
        self.activations[source] = activation[None]
        for code in self.codes:
            if not code.made and all(s in self.activations for s in code.pipeline.inputs):
                code.made = True
                self._write_slots(code)

    def _write_slots(self, code: Code) -> None:
        history = code.history
        assert history is not None
        step = history.step
        if step is None:
            return
        records = code.pipeline.records(self.activations)[0, : step.starts[-1]]
        if code.recent is None:
            slots = code.pipeline.slots(records[None])[0]
            places = step.slots[: len(slots)]
            history.write(places, code.packed.pack(slots), code.columns)
            return
        assert code.recent.step is not None
        places = code.recent.step.slots[: len(records)]
        code.recent.write(places, records, code.recent_columns)
        for request, after in enumerate(step.seen):
            self._write_pooled(code, step, request, records, after)

    def _write_pooled(
        self, code: Code, step: PagedStep, request: int, records: Tensor, after: int
    ) -> None:
        """The slots of one request whose last token is in this step, whose records are given."""
        assert code.history is not None and code.recent is not None
        schedule, group = code.schedule, code.schedule.group
        start, stop = step.starts[request], step.starts[request + 1]
        before = after - (stop - start)
        numbers = range(schedule.made(before), schedule.made(after))
        if not numbers:
            return
        lead = group if code.pipeline.overlap else 0
        tokens = torch.arange(group * numbers.start - lead, group * numbers.stop) + schedule.anchors
        joined = code.recent.read_joined(
            request,
            tokens.clamp_min(schedule.anchors),
            code.recent_columns,
            records[start:stop],
            before,
        )
        has_before = None
        if lead:
            has_before = torch.arange(numbers.start, numbers.stop, device=records.device)[None] > 0
        slots = code.pipeline.slots(joined[None], has_before)[0]
        last = schedule.anchors + group * torch.arange(numbers.start + 1, numbers.stop + 1) - 1
        places = step.slots[start + last - before] // group
        code.history.write(places, code.packed.pack(slots), code.columns)

    def code_of(self, layer: int) -> Code | None:
        """The code that a layer reads; None for a dropped history."""
        return next((code for code in self.codes if layer in code.pipeline.layers), None)


def _history(group: int) -> str:
    return f"history-{group}"


class _HiddenNote:
    """Notes the output of the layers before one, which vLLM carries in two parts."""

    def __init__(self, folding: Folding, source: Source) -> None:
        self.folding = folding
        self.source = source

    def __call__(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
        residual = kwargs["residual"] if "residual" in kwargs else args[2]
        # vLLM adds to both in place later on.
        self.folding.note(self.source, hidden.clone() if residual is None else hidden + residual)


class _ProjectionNote:
    """Notes an attention's keys and values, before norm and RoPE, and its input."""

    def __init__(self, folding: Folding, stand_in: FoldedAttention, kinds: Sequence[Any]) -> None:
        self.folding = folding
        self.stand_in = stand_in
        self.kinds = kinds

    def __call__(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        width, layer = self.stand_in.local.kv_width, self.stand_in.index
        projected = output[0]
        # vLLM rotates keys in place, perhaps before the last input of a code has come.
        found = {
            "inputs": args[0],
            "keys": projected[..., -2 * width : -width].clone(),
            "values": projected[..., -width:],
        }
        for kind in self.kinds:
            part = found[kind]
            self.folding.note(
                Source(kind, layer), part if kind == "inputs" else self.stand_in.gathered(part)
            )
