"""One layer's attention on captured activations: over its exact history, and over slots.

What a fit is worth to a layer is how near its attention output comes to the one that the exact
history gives, for the model's own queries. Outputs are taken after the output gate and o_proj,
which is where the layers above feel them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.anatomy import rotary
from kvfold.fitting.gram import exact_dtype
from kvfold.methods import Activations, Pipeline, Source
from kvfold.plan import Plan
from kvfold.runtime.layer import FoldedAttention, Rotation
from kvfold.runtime.reference import reference_mask
from kvfold.runtime.schedule import Schedule


def attention_sources(layers: tuple[int, ...]) -> frozenset[Source]:
    """What `LayerAttention` needs captured of some layers."""
    return frozenset(
        source
        for layer in layers
        for source in (Source("inputs", layer), Source("keys", layer), Source("values", layer))
    )


class _Near(NamedTuple):
    """Attention over exact tokens only: log of the softmax's sum, and its output.

    log_mass: (batch, kv_heads, grouped, 1); output: (batch, kv_heads, grouped, head_dim).
    """

    log_mass: Tensor
    output: Tensor


class LayerAttention:
    """Some queries of a batch of rows in one layer.

    fold: the layer, under any pipeline. exact: captured activations with the layer's
    `attention_sources`, each (batch, seq, width), rows without padding. positions: (queries,) of
    the queries looked at.
    """

    def __init__(
        self, fold: FoldedAttention, model: Any, exact: Activations, positions: Tensor
    ) -> None:
        self.fold = fold
        self.model = model
        self._known: dict[tuple[int, int, int], _Near] = {}
        self.positions = positions
        hidden = exact[Source("inputs", fold.index)]
        self.dtype = next(fold.module.parameters()).dtype
        self.work = exact_dtype(hidden).dtype
        here = torch.arange(hidden.shape[1], device=hidden.device)[None]
        self.seq = hidden.shape[1]
        with torch.no_grad():
            projected = fold.family.project(fold.module, hidden[:, positions].to(self.dtype))
            queries = fold.finish_queries(projected.queries, self._rotation(here[:, positions]))
            self.queries = self._grouped(exact_dtype(queries))
            self.gate = None
            if projected.gate is not None:
                self.gate = exact_dtype(projected.gate).sigmoid()
            keys, values = exact[Source("keys", fold.index)], exact[Source("values", fold.index)]
            heads = fold.heads(keys.to(self.dtype))
            self.keys = exact_dtype(fold.finish_keys(heads, self._rotation(here)))
            self.values = exact_dtype(fold.heads(values))
            self.logits = torch.matmul(self.queries, self.keys.transpose(2, 3)) * fold.scaling

    def _rotation(self, positions: Tensor) -> Rotation:
        like = torch.empty(0, dtype=self.work, device=positions.device)
        return Rotation.of(*rotary(self.model, self.fold.family, positions, like))

    def _grouped(self, queries: Tensor) -> Tensor:
        """(batch, heads, queries, d) to (batch, kv_heads, query heads of each * queries, d)."""
        kv_heads = self.fold.anatomy.kv_heads
        return queries.reshape(queries.shape[0], kv_heads, -1, queries.shape[-1])

    def _output(self, weighted: Tensor) -> Tensor:
        """(batch, kv_heads, grouped, d) to the layer's output, (batch, queries, hidden)."""
        batch, count = weighted.shape[0], self.positions.shape[0]
        by_head = weighted.reshape(batch, -1, count, weighted.shape[-1])
        flat = by_head.transpose(1, 2).flatten(2)
        flat = flat if self.gate is None else flat * self.gate
        projection = self.fold.module.o_proj
        bias = None if projection.bias is None else exact_dtype(projection.bias.detach())
        return functional.linear(flat, exact_dtype(projection.weight.detach()), bias)

    def _seen(self, mask: Tensor, logits: Tensor) -> Tensor:
        """Logits with what each query does not see at -inf; mask: (queries, places)."""
        repeat = logits.shape[2] // mask.shape[0]
        return logits.masked_fill(~mask.repeat(repeat, 1), -torch.inf)

    @torch.no_grad()
    def exact(self) -> Tensor:
        """Output over the whole exact history: (batch, queries, hidden)."""
        places = torch.arange(self.seq, device=self.positions.device)
        seen = places[None] <= self.positions[:, None]
        weights = self._seen(seen, self.logits).softmax(dim=-1)
        return self._output(torch.matmul(weights, self.values))

    def folded(
        self,
        fold: FoldedAttention,
        codes: Tensor,
        plan: Plan,
        *,
        window: int | None = None,
        quantised: bool = False,
    ) -> Tensor:
        """Output over anchors, window and slots: (batch, queries, hidden), with gradients.

        fold: this layer, with the pipeline that made the slots. codes: (batch, slots, code_width)
        from `Pipeline.whole_slots`. window: in place of the plan's. quantised: whether slots that
        the layer keeps expanded come back from the pipeline's bits; codes that are kept are given
        so.
        """
        pipeline = fold.pipeline
        window = plan.window if window is None else window
        numbers = torch.arange(codes.shape[1], device=codes.device)
        first = plan.anchors + pipeline.slot_position
        places = (pipeline.group * numbers + first)[None]
        slot_keys, slot_values = fold.unfold(codes[:, None], self._rotation(places))
        if quantised and fold.reading == "expanded":
            slot_keys, slot_values = pipeline.rounded_heads(slot_keys, slot_values)
        near = self._near(plan.anchors, window, pipeline.group)
        _, seen = self._masks(plan.anchors, window, pipeline.group, codes.shape[1])
        logits = torch.matmul(self.queries, slot_keys.transpose(2, 3)) * fold.scaling
        bias = fold.slot_bias()
        if bias is not None:
            by_kv_head = bias.view(fold.anatomy.kv_heads, -1)
            logits = logits + by_kv_head.repeat_interleave(len(self.positions), dim=1)[..., None]
        mass = torch.cat([near.log_mass, self._seen(seen, logits)], dim=-1).softmax(dim=-1)
        history = torch.matmul(mass[..., 1:], slot_values)
        return self._output(mass[..., :1] * near.output + history)

    def _masks(self, anchors: int, window: int, group: int, slots: int) -> tuple[Tensor, Tensor]:
        """Which exact tokens and which slots each query sees."""
        mask = reference_mask(
            self.positions, self.seq, slots, anchors=anchors, window=window, group=group
        )
        return mask[:, : self.seq], mask[:, self.seq :]

    @torch.no_grad()
    def _near(self, anchors: int, window: int, group: int) -> _Near:
        """Anchors and window, which no gate changes, as one key: computed once for all gates."""
        key = (anchors, window, group)
        if key not in self._known:
            seen, _ = self._masks(anchors, window, group, 0)
            logits = self._seen(seen, self.logits)
            output = torch.matmul(logits.softmax(dim=-1), self.values)
            self._known[key] = _Near(logits.logsumexp(dim=-1, keepdim=True), output)
        return self._known[key]


def first_with_history(plan: Plan, pipeline: Pipeline, seq: int) -> int:
    """The first position whose query sees a slot; seq if none does."""
    schedule = Schedule(plan.anchors, plan.window, pipeline.group)
    return next((t for t in range(seq) if schedule.slots(t + 1)), seq)
