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

from kvfold.anatomy import Anatomy, anatomy
from kvfold.fitting.attention_output import (
    LayerAttention,
    attention_sources,
    first_with_history,
)
from kvfold.fitting.gram import Moments, exact_dtype
from kvfold.fitting.tasks import target_of
from kvfold.methods import Activations, Pipeline, Source
from kvfold.plan import Plan
from kvfold.runtime.capture import capture
from kvfold.runtime.layer import FoldedAttention, folded_layers
from kvfold.runtime.sharding import whole


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
        self.cosine = self.error = self.size = 0.0
        self.queries = 0

    def to_dict(self) -> dict[str, Any]:
        mapped = bool(self.fold.method.problems())
        return {
            "method": self.fold.method.name,
            "keys_r2": round(self.keys.r2, 6) if mapped else None,
            "values_r2": round(self.values.r2, 6) if mapped else None,
            "attention_cosine": round(self.cosine / self.queries, 6) if self.queries else None,
            "attention_error": round(self.error / self.size, 6) if self.size > 0 else None,
        }


@torch.no_grad()
def report_fit(
    model: Any, plan: Plan, pipelines: nn.ModuleList, held_out: Tensor, *, batch: int = 4
) -> dict[str, Any]:
    """Held-out R^2 of keys and values and attention-output cosine of every fitted layer.

    pipelines: the plan's, fitted. held_out: (windows, seq) ids without padding. batch: windows in
    one forward. Returns plain data: `held_out_tokens`, `layers` (by layer number: method,
    keys_r2, values_r2, attention_cosine, attention_error) and `mean_attention_cosine`. R^2 is that
    of the depth maps, before any pooling; None where there are none. Cosine and error (squared,
    relative) are those of the layer's output over the slots; None where no query has a history
    (windows no longer than anchors and window together).
    """
    shape = anatomy(model)
    folds = _fitted_layers(model, shape, pipelines)
    if not folds:
        return {}
    device = next(model.parameters()).device
    reports = {fold.index: _LayerReport(fold, device) for fold in folds}
    sources = attention_sources(tuple(reports))
    sources |= {source for fold in folds for source in fold.pipeline.inputs}
    for ids in torch.split(held_out, batch):
        captured = capture(model, shape, sources, ids)
        exact = {source: exact_dtype(x) for source, x in captured.items()}
        records: dict[Pipeline, Tensor] = {}
        for layer, report in reports.items():
            pipeline = report.fold.pipeline
            if pipeline not in records:
                records[pipeline] = pipeline.records(exact)
            made = records[pipeline]
            decoded = pipeline.depth.decode(layer, made[..., : pipeline.depth.code_width])
            _add_explained(report, shape, plan.anchors, exact, decoded)
            with whole(model, layer):
                slots = pipeline.whole_slots(made, plan.anchors)
                _add_attention(report, model, plan, exact, slots)
    layers = {str(layer): reports[layer].to_dict() for layer in sorted(reports)}
    cosines = [r.cosine / r.queries for r in reports.values() if r.queries]
    return {
        "held_out_tokens": held_out.numel(),
        "mean_attention_cosine": round(sum(cosines) / len(cosines), 6) if cosines else None,
        "layers": layers,
    }


def _fitted_layers(model: Any, shape: Anatomy, pipelines: nn.ModuleList) -> list[FoldedAttention]:
    members: list[Pipeline] = list(pipelines)  # type: ignore[arg-type]
    fitted = [pipeline for pipeline in members if any(True for _ in pipeline.parameters())]
    return folded_layers(model, shape, fitted)


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


def _add_attention(
    report: _LayerReport, model: Any, plan: Plan, exact: Activations, codes: Tensor
) -> None:
    """Every query with a history: over the exact one, and over the fold's slots."""
    fold = report.fold
    seq = exact[Source("inputs", fold.index)].shape[1]
    first = first_with_history(plan, fold.pipeline, seq)
    if first == seq:
        return
    positions = torch.arange(first, seq, device=codes.device)
    for row in range(codes.shape[0]):
        one = {source: x[row : row + 1] for source, x in exact.items()}
        attention = LayerAttention(fold, model, one, positions)
        wanted, got = attention.exact(), attention.folded(fold, codes[row : row + 1], plan)
        cosines = functional.cosine_similarity(wanted, got, dim=-1)
        report.cosine += float(cosines.double().sum())
        report.queries += seq - first
        report.error += float((wanted - got).double().pow(2).sum())
        report.size += float(wanted.double().pow(2).sum())
