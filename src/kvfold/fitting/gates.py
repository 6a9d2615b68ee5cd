"""Training of pooling gates, each layer alone, on the frozen model.

One forward of the model a step gives every layer's exact activations. A layer's gate is then moved
so that its attention over anchors, window and slots gives what attention over the exact history
gives: the squared error of the layer's output, relative to its size, over queries drawn from those
that have a history. Layers share nothing but the forward, and maps of the depth axis stay as they
were fitted. This is the per-layer form of the training in the second model card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.anatomy import Anatomy, attention_module
from kvfold.errors import CorpusError, FitError
from kvfold.fitting.attention_output import (
    LayerAttention,
    attention_sources,
    first_with_history,
)
from kvfold.fitting.gram import exact_dtype
from kvfold.fitting.seeds import drawn_order
from kvfold.methods import Activations, Pipeline, PoolGate, Source
from kvfold.plan import Plan
from kvfold.runtime.capture import capture
from kvfold.runtime.layer import FoldedAttention

LEAST_SEQ = 1024
"""Tokens a row should have, or the history that gates are trained on is too short to matter."""


@dataclass(frozen=True)
class GateSettings:
    """How gates are trained.

    steps: of Adam. moves: how many of them use one row of the text, with new queries each, since
    the model's forward costs several times as much as a step. learning_rate: at its highest,
    warmed up over the first tenth and then lowered along a cosine. queries: drawn a step. windows:
    window sizes that steps take in turn, beside the plan's own; () for that alone. seed: of all
    draws.
    """

    steps: int = 128
    moves: int = 4
    learning_rate: float = 3e-2
    queries: int = 128
    windows: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 0, "moves": 1, "queries": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise FitError(
                    f"{name} of the gates' training must be at least {smallest}; got "
                    f"{getattr(self, name)}"
                )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise FitError(f"the gates' learning rate must be above 0; got {self.learning_rate}")


def trainable(pipelines: nn.ModuleList) -> list[Pipeline]:
    """The pipelines whose gates have weights."""
    members: list[Pipeline] = list(pipelines)  # type: ignore[arg-type]
    gated = [pipeline for pipeline in members if pipeline.sequence is not None]
    return [pipeline for pipeline in gated if any(True for _ in gate_of(pipeline).parameters())]


KnownOutputs = dict[tuple[int, int, int, int], tuple[LayerAttention, Tensor]]
"""By layer, anchors, window and group: the exact attention of one row's drawn queries."""


def gate_of(pipeline: Pipeline) -> PoolGate:
    """The gate of a pipeline that has one."""
    assert pipeline.sequence is not None
    return pipeline.sequence


def train_gates(
    model: Any,
    shape: Anatomy,
    trainers: Sequence[GateTrainer],
    tokens: Tensor,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Every step that is left of some trainers of equal settings, one forward a step for all.

    tokens: (windows, seq) ids without padding.
    """
    settings = trainers[0].settings
    sources = frozenset[Source]().union(*(trainer.sources for trainer in trainers))
    exact: dict[Source, Tensor] = {}
    for number in range(min(trainer.done for trainer in trainers), settings.steps):
        if not exact or number % settings.moves == 0:
            ids = _row(tokens, number // settings.moves, settings.seed)
            captured = capture(model, shape, sources, ids)
            exact = {source: exact_dtype(x) for source, x in captured.items()}
        known: KnownOutputs = {}
        for trainer in trainers:
            trainer.step(exact, known)
        after_step()


def _row(tokens: Tensor, number: int, seed: int) -> Tensor:
    """A row of the text, (1, seq): each once in a drawn order, then again in another."""
    turn, place = divmod(number, len(tokens))
    chosen = int(drawn_order(len(tokens), seed + turn)[place])
    return tokens[chosen : chosen + 1]


def _parameter_groups(pipeline: Pipeline) -> list[dict[str, Any]]:
    """What scores tokens by their inputs, whose step depends on the inputs' size, and the rest."""
    pipeline.depth.requires_grad_(False)
    gate = gate_of(pipeline).requires_grad_(True)
    scoring = [] if gate.score is None else list(gate.score.parameters())
    known = {id(parameter) for parameter in scoring}
    rest = [parameter for parameter in gate.parameters() if id(parameter) not in known]
    return [{"params": scoring, "scale": 1.0}, {"params": rest, "scale": 1.0}]


class GateTrainer:
    """The gates of one plan in training; `step` takes the activations of one row of text.

    pipelines: the plan's, with fitted depth maps, in float32 or float64. seq: tokens of a row.
    Raises `CorpusError` where rows are too short to have a history.
    """

    def __init__(
        self,
        model: Any,
        shape: Anatomy,
        plan: Plan,
        pipelines: nn.ModuleList,
        seq: int,
        settings: GateSettings,
    ) -> None:
        self.model, self.shape, self.plan, self.seq = model, shape, plan, seq
        self.settings = settings
        self.pipelines = trainable(pipelines)
        self.windows = tuple(dict.fromkeys((plan.window, *settings.windows)))
        self._check_length()
        self.folds = {
            layer: FoldedAttention(
                layer,
                attention_module(model, layer),
                shape.family,
                shape.layers[layer],
                pipeline,
                "expanded",
            )
            for pipeline in self.pipelines
            for layer in pipeline.layers
        }
        self.sources = attention_sources(tuple(self.folds)) | {
            source for pipeline in self.pipelines for source in pipeline.inputs
        }
        self.optimizer = torch.optim.Adam(
            [group for pipeline in self.pipelines for group in _parameter_groups(pipeline)],
            betas=(0.9, 0.99),
        )
        self.done = 0
        self.losses: list[dict[int, float]] = []

    def _check_length(self) -> None:
        for window in self.windows:
            self.plan.replace(window=window).check(self.shape)
        widest = self.plan.replace(window=max(self.windows))
        if any(first_with_history(widest, pipe, self.seq) >= self.seq for pipe in self.pipelines):
            raise CorpusError(
                f"gates are trained on the history, and rows of {self.seq} tokens have none beyond "
                f"{self.plan.anchors} anchors and a window of {max(self.windows)}; give rows of "
                f"at least {LEAST_SEQ} tokens"
            )

    def state_dict(self) -> dict[str, Any]:
        """All that another trainer of the same job needs to go on."""
        return {
            "done": self.done,
            "gates": [gate_of(pipeline).state_dict() for pipeline in self.pipelines],
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another trainer was."""
        self.done, self.losses = int(state["done"]), list(state["losses"])
        for pipeline, gate in zip(self.pipelines, state["gates"], strict=True):
            gate_of(pipeline).load_state_dict(gate)
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, exact: Activations, known: KnownOutputs) -> None:
        """One move of every gate. exact: `sources` of one row, in float32 or float64.

        known: what other trainers have computed of this row already; added to.
        """
        if self.done == 0:
            self._scale_to_inputs(exact)
            self._start_biases(exact, known)
        losses: dict[int, float] = {}
        for pipeline in self.pipelines:
            with torch.enable_grad():
                loss = self._loss(pipeline, exact, known, losses)
                loss.backward()  # type: ignore[no-untyped-call]
        self._require_finite(losses)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate() * group["scale"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(losses)
        self.done += 1

    def _rate(self) -> float:
        steps, top = self.settings.steps, self.settings.learning_rate
        warm = min(1.0, (self.done + 1) / max(1, steps // 10))
        return top * warm * 0.5 * (1 + math.cos(math.pi * self.done / steps))

    def _loss(
        self,
        pipeline: Pipeline,
        exact: Activations,
        known: KnownOutputs,
        losses: dict[int, float],
    ) -> Tensor:
        window = self.windows[self.done % len(self.windows)]
        codes = pipeline.whole_slots(pipeline.records(exact), self.plan.anchors)
        positions = self._positions(pipeline, window, codes)
        total = codes.new_zeros(())
        for layer in pipeline.layers:
            fold = self.folds[layer]
            key = (layer, self.plan.anchors, window, pipeline.group)
            if key not in known:
                made = LayerAttention(fold, self.model, exact, positions)
                known[key] = made, made.exact()
            attention, wanted = known[key]
            error = attention.folded(fold, codes, self.plan, window=window) - wanted
            size = wanted.pow(2).sum().clamp_min(torch.finfo(wanted.dtype).tiny)
            loss = error.pow(2).sum() / size
            losses[layer] = float(loss.detach())
            total = total + loss
        return total

    def _positions(self, pipeline: Pipeline, window: int, like: Tensor) -> Tensor:
        first = first_with_history(self.plan.replace(window=window), pipeline, self.seq)
        order = drawn_order(self.seq - first, self.settings.seed * 1_000_003 + self.done)
        drawn = order[: self.settings.queries]
        return (first + drawn.sort().values).to(like.device)

    @torch.no_grad()
    def _scale_to_inputs(self, exact: Activations) -> None:
        """Let a step of Adam move scores equally far in every layer, however large its inputs.

        Inputs of attention have another root mean square in each layer (0.05 to 1 in one model),
        and a step moves each weight by the learning rate.
        """
        for pipeline, group in zip(self.pipelines, self.optimizer.param_groups[::2], strict=True):
            inputs = pipeline.gate_input(exact)
            rms = float(inputs.double().pow(2).mean().sqrt())
            group["scale"] = 1.0 / rms if rms > 0 else 1.0
            for weight in group["params"]:
                weight.mul_(group["scale"])

    @torch.no_grad()
    def _start_biases(self, exact: Activations, known: KnownOutputs) -> None:
        """Start the logit bias of slots at 0 or at log r, whichever fits the first window."""
        for pipeline in self.pipelines:
            gate = pipeline.sequence
            if gate is None or not gate.mass:
                continue
            found = []
            for start in (0.0, math.log(gate.group)):
                for bias in gate.mass.values():
                    bias.fill_(start)
                found.append((float(self._loss(pipeline, exact, known, {})), start))
            for bias in gate.mass.values():
                bias.fill_(min(found)[1])

    def _require_finite(self, losses: dict[int, float]) -> None:
        wrong = [layer for layer, loss in losses.items() if not math.isfinite(loss)]
        if wrong:
            raise FitError(
                f"the loss of every gate must be finite; at step {self.done} those of layers "
                f"{wrong} are not; lower the learning rate, or load the model in bfloat16 or "
                "float32"
            )

    def report(self) -> dict[str, Any]:
        """Mean relative error of the first and of the last tenth of the steps, by layer."""
        tenth = max(1, len(self.losses) // 10)
        parts = {"first": self.losses[:tenth], "last": self.losses[-tenth:]}
        return {
            "steps": self.done,
            "windows": list(self.windows),
            "learning_rate": self.settings.learning_rate,
            "error": {
                name: {
                    str(layer): round(sum(step[layer] for step in steps) / len(steps), 6)
                    for layer in sorted(self.folds)
                }
                for name, steps in parts.items()
                if steps
            },
        }
