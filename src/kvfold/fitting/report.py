"""What a fit is worth on text that it has not seen, map by map.

R^2 says how much of a layer's keys and values comes back; attention-output cosine says what that
means to the layer: the model's own queries once over the exact history and once over the
regenerated one, under the plan's anchors and window. R^2 alone does not predict quality. Only
tokens beyond the anchors count, and for the cosine only queries that have a history. Under a
k_norm the R^2 of keys is that of their directions, both brought to length 1 per value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvfold.anatomy import Anatomy, anatomy, attention_module, rotary
from kvfold.fitting.gram import Moments, exact_dtype
from kvfold.fitting.tasks import target_of
from kvfold.methods import Activations, DepthMethod, Source
from kvfold.plan import Plan
from kvfold.runtime.capture import capture_all
from kvfold.runtime.layer import FoldedAttention, Rotation
from kvfold.runtime.reference import reference_attention
from kvfold.runtime.schedule import Schedule


class _Explained:
    """Streamed R^2: one minus the error's share of the target's variance."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.moments = Moments(width, device)
        self.error = 0.0

    def add(self, target: Tensor, prediction: Tensor) -> None:
        rows = target.reshape(-1, target.shape[-1])
        self.moments.add(rows)
        difference = rows - prediction.reshape(rows.shape).to(rows.dtype)
        self.error += float(difference.double().pow(2).sum())

    @property
    def r2(self) -> float:
        total = float(self.moments.variance.sum()) * self.moments.count
        return 1.0 - self.error / total if total > 0 else float(self.error == 0)


class _LayerReport:
    """The running figures of one folded layer."""

    def __init__(self, fold: FoldedAttention, device: torch.device) -> None:
        self.fold = fold
        self.keys = _Explained(fold.anatomy.kv_width, device)
        self.values = _Explained(fold.anatomy.kv_width, device)
        self.cosine = 0.0
        self.queries = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.fold.method.name,
            "keys_r2": round(self.keys.r2, 6),
            "values_r2": round(self.values.r2, 6),
            "attention_cosine": round(self.cosine / self.queries, 6) if self.queries else None,
        }


@torch.no_grad()
def report_fit(
    model: Any, plan: Plan, methods: nn.ModuleList, held_out: Tensor, *, batch: int = 4
) -> dict[str, Any]:
    """Held-out R^2 of keys and values and attention-output cosine of every fitted layer.

    methods: the plan's, fitted. held_out: (windows, seq) ids without padding. batch: windows in
    one forward. Returns plain data: `held_out_tokens`, `layers` (by layer number: method,
    keys_r2, values_r2, attention_cosine) and `mean_attention_cosine`; a cosine is None where no
    query has a history (windows no longer than anchors and window together).
    """
    shape = anatomy(model)
    folds = _fitted_layers(model, shape, methods)
    if not folds:
        return {}
    device = next(model.parameters()).device
    reports = {fold.index: _LayerReport(fold, device) for fold in folds}
    sources = {source for fold in folds for source in fold.method.inputs}
    sources |= {Source(kind, layer) for layer in reports for kind in ("keys", "values")}
    for ids in torch.split(held_out, batch):
        captured = capture_all(model, shape, sources, reports, ids)
        exact = {source: exact_dtype(x) for source, x in captured.activations.items()}
        codes: dict[DepthMethod, Tensor] = {}
        for layer, report in reports.items():
            method = report.fold.method
            if method not in codes:
                codes[method] = method.encode(exact)
            decoded = method.decode(layer, codes[method])
            _add_explained(report, shape, plan.anchors, exact, decoded)
            _add_cosine(report, model, plan, exact, decoded, captured.attention_inputs[layer])
    layers = {str(layer): reports[layer].to_dict() for layer in sorted(reports)}
    cosines = [r.cosine / r.queries for r in reports.values() if r.queries]
    return {
        "held_out_tokens": held_out.numel(),
        "mean_attention_cosine": round(sum(cosines) / len(cosines), 6) if cosines else None,
        "layers": layers,
    }


def _fitted_layers(model: Any, shape: Anatomy, methods: nn.ModuleList) -> list[FoldedAttention]:
    members: list[DepthMethod] = list(methods)  # type: ignore[arg-type]
    return [
        FoldedAttention(
            index=layer,
            module=attention_module(model, layer),
            family=shape.family,
            anatomy=shape.layers[layer],
            method=method,
            reading="expanded",
        )
        for method in members
        if method.problems()
        for layer in method.layers
    ]


def _add_explained(
    report: _LayerReport,
    shape: Anatomy,
    anchors: int,
    exact: Activations,
    decoded: tuple[Tensor, Tensor],
) -> None:
    layer = report.fold.index
    keys, values = Source("keys", layer), Source("values", layer)
    predicted = {keys: decoded[0], values: decoded[1]}
    for source, explained in ((keys, report.keys), (values, report.values)):
        target = target_of(shape, source, exact)[:, anchors:]
        explained.add(target, target_of(shape, source, predicted)[:, anchors:])


def _add_cosine(
    report: _LayerReport,
    model: Any,
    plan: Plan,
    exact: Activations,
    decoded: tuple[Tensor, Tensor],
    attention_input: Tensor,
) -> None:
    fold, seq = report.fold, attention_input.shape[1]
    schedule = Schedule(plan.anchors, plan.window)
    first = next((t for t in range(seq) if schedule.slots(t + 1)), seq)
    if first == seq:
        return
    keys, values = exact[Source("keys", fold.index)], exact[Source("values", fold.index)]
    for row in range(len(attention_input)):
        one = slice(row, row + 1)
        queries = _Queries(fold, model, attention_input[one], first)
        own = queries.ready(keys[one]), queries.ready(values[one], keys=False)
        slots = queries.ready(decoded[0][one]), queries.ready(decoded[1][one], keys=False)
        outputs = [queries.attend(own, history, plan) for history in (own, slots)]
        cosines = functional.cosine_similarity(outputs[0], outputs[1], dim=-1)
        report.cosine += float(cosines.double().sum())
        report.queries += seq - first


class _Queries:
    """A row's own queries (and output gate) from position `first` on, and what they see."""

    def __init__(self, fold: FoldedAttention, model: Any, hidden: Tensor, first: int) -> None:
        self.fold = fold
        self.dtype = hidden.dtype
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        self.rotation = Rotation.of(*rotary(model, fold.family, positions, hidden))
        projected = fold.family.project(fold.module, hidden)
        queries = fold.finish_queries(projected.queries, self.rotation)
        self.queries = exact_dtype(queries[:, :, first:])
        gate = projected.gate
        self.gate = None if gate is None else exact_dtype(gate[:, first:]).sigmoid()

    def ready(self, flat: Tensor, *, keys: bool = True) -> Tensor:
        """Keys or values (1, seq, kv_width) as attention takes them, normed and rotated."""
        heads = self.fold.heads(flat.to(self.dtype))
        return exact_dtype(self.fold.finish_keys(heads, self.rotation) if keys else heads)

    def attend(
        self, own: tuple[Tensor, Tensor], history: tuple[Tensor, Tensor], plan: Plan
    ) -> Tensor:
        """Gated attention output over exact tokens and the history's slots: (1, queries, width)."""
        output = reference_attention(
            self.queries,
            *own,
            history[0][:, :, plan.anchors :],
            history[1][:, :, plan.anchors :],
            anchors=plan.anchors,
            window=plan.window,
            scaling=self.fold.scaling,
        )
        flat = output.transpose(1, 2).flatten(2)
        return flat if self.gate is None else flat * self.gate
