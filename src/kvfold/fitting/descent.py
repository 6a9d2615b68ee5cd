"""Descent of add-on weights on attention output, each layer alone, on the frozen model.

One forward of the model gives every layer's exact activations. Weights are then moved so that a
layer's attention over anchors, window and slots gives what attention over the exact history
gives: the squared error of the layer's output, relative to its size, over queries drawn from those
that have a history. A pipeline's loss is the sum over the layers that read it. Pipelines share
nothing but the forward (and, rarely, the maps of one hidden state). Several workers take different
rows and average their gradients.

What is trained is an argument: `kvfold.fitting.gates` trains pooling gates only, and
`kvfold.fitting.refine` all that an add-on has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.anatomy import Anatomy
from kvfold.errors import CorpusError, DivergedError, FitError
from kvfold.fitting.attention_output import (
    LayerAttention,
    attention_sources,
    first_with_history,
)
from kvfold.fitting.draws import check_draws
from kvfold.fitting.scaled_adam import ScaledAdam
from kvfold.fitting.seeds import drawn_order
from kvfold.fitting.shared_steps import average_gradients, start_alike, summed
from kvfold.fitting.workers import ALONE, Workers
from kvfold.methods import Activations, Pipeline
from kvfold.plan import Plan
from kvfold.runtime.layer import Reading, folded_layers
from kvfold.runtime.sharding import whole

LEAST_SEQ = 1024
"""Tokens a row should have, or the history that is trained on is too short to matter."""
WARM_FRACTION = 0.1
"""Of the steps: the learning rate rises over them, and falls along a cosine afterwards."""

KnownOutputs = dict[tuple[int, int, int, int], tuple[LayerAttention, Tensor, Tensor]]
"""By layer, anchors, window and group: the exact attention of one batch's drawn queries, its
output, and the sum of the output's squares.
"""


@dataclass(frozen=True)
class Descent:
    """How weights are moved: what every training on attention output is told.

    steps: of Adam. moves: how many of them use one batch of the text, with new queries each, since
    the model's forward costs several times as much as a step. learning_rate: at its highest,
    warmed up over the first tenth and then lowered along a cosine. queries: drawn a step. windows:
    window sizes that steps take in turn, beside the plan's own; () for that alone. seed: of all
    draws.
    """

    steps: int
    moves: int
    learning_rate: float
    queries: int
    windows: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 0, "moves": 1, "queries": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise FitError(
                    f"{name} of a training must be at least {smallest}; got {getattr(self, name)}"
                )
        check_draws(self.learning_rate, self.windows, self.seed)

    def rate(self, step: int) -> float:
        """The learning rate of one step, from 0 on."""
        warm = min(1.0, (step + 1) / max(1, int(self.steps * WARM_FRACTION)))
        fallen = 0.5 * (1 + math.cos(math.pi * step / max(1, self.steps)))
        return self.learning_rate * warm * fallen


def remedy_of(steps: int, learning_rate: float) -> str:
    """What helps where a loss is no number after so many steps: before any, no learning rate."""
    wide = "load the model in bfloat16 or float32"
    if steps == 0:
        return f"solve for the maps first, by a closed-form stage, or {wide}"
    return f"take a learning_rate below {learning_rate:g}, or {wide}"


def windows_of(plan: Plan, settings: Descent) -> tuple[int, ...]:
    """The window sizes that steps take in turn, each once."""
    return tuple(dict.fromkeys((plan.window, *settings.windows)))


def check_history(
    shape: Anatomy, plan: Plan, pipelines: Iterable[Pipeline], windows: Sequence[int], seq: int
) -> None:
    """Raise `CorpusError` unless every pipeline has a history in rows of seq tokens.

    Raises `PlanError` for a window that the plan can't have.
    """
    for window in windows:
        plan.replace(window=window).check(shape)
    widest = plan.replace(window=max(windows))
    if any(first_with_history(widest, pipeline, seq) >= seq for pipeline in pipelines):
        raise CorpusError(
            f"weights are trained on the history, and rows of {seq} tokens have none beyond "
            f"{plan.anchors} anchors and a window of {max(windows)}; give rows of at least "
            f"{LEAST_SEQ} tokens"
        )


class AttentionDescent:
    """Weights of one plan's pipelines in training; `step` takes the activations of one batch.

    pipelines: those with weights to train, in float32 or float64, with `requires_grad` set on what
    moves and only there. seq: tokens of a row. groups: of `ScaledAdam`. readings: how each layer
    reads its history; where they are given, slots are quantised as the plan says, and None is for
    weights that are to serve any bits. workers: those that take the same steps on other rows.
    Raises `CorpusError` where rows are too short to have a history.
    """

    def __init__(
        self,
        model: Any,
        shape: Anatomy,
        plan: Plan,
        pipelines: Sequence[Pipeline],
        seq: int,
        settings: Descent,
        groups: list[dict[str, Any]],
        readings: Mapping[int, Reading] | None = None,
        workers: Workers = ALONE,
    ) -> None:
        self.model, self.shape, self.plan, self.seq = model, shape, plan, seq
        self.workers = workers
        self.settings = settings
        self.pipelines = list(pipelines)
        self.windows = windows_of(plan, settings)
        check_history(shape, plan, self.pipelines, self.windows, seq)
        self.quantised = readings is not None
        folds = folded_layers(model, shape, self.pipelines, readings)
        self.folds = {fold.index: fold for fold in folds}
        self.sources = attention_sources(tuple(self.folds)) | {
            source for pipeline in self.pipelines for source in pipeline.inputs
        }
        self.optimizer = ScaledAdam(groups, lr=settings.learning_rate)
        self.done = 0
        self.losses: list[dict[int, float]] = []

    def state_dict(self) -> dict[str, Any]:
        """All that another descent of the same job needs to go on, but the weights."""
        return {
            "done": self.done,
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another descent was."""
        self.done, self.losses = int(state["done"]), list(state["losses"])
        self.optimizer.load_state_dict(state["optimizer"])

    def start_alike(self) -> None:
        """Have the first worker's weights, and its scales of steps."""
        start_alike(self.workers, self.optimizer)

    def step(
        self,
        exact: Activations,
        known: KnownOutputs,
        pipelines: Iterable[Pipeline] | None = None,
    ) -> None:
        """One move. exact: `sources` of one batch, this worker's rows, in float32 or float64.

        known: what others have computed of this batch and step already; added to. pipelines: the
        ones that move, all by default.
        """
        losses: dict[int, float] = {}
        for pipeline in self.pipelines if pipelines is None else pipelines:
            with self.whole_layers(pipeline), torch.enable_grad():
                found = self.drawn_errors(pipeline, exact, known)
                total = torch.stack(list(found.values())).sum()
                if total.requires_grad:  # not where all layers hold what they read as it is
                    total.backward()  # type: ignore[no-untyped-call]
            losses.update({layer: float(error.detach()) for layer, error in found.items()})
        means = summed(self.workers, list(losses.values()))
        losses = {n: total / self.workers.count for n, total in zip(losses, means, strict=True)}
        self._require_finite(losses)
        average_gradients(
            self.workers, (w for group in self.optimizer.param_groups for w in group["params"])
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate(self.done)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(losses)
        self.done += 1

    @contextmanager
    def whole_layers(self, pipeline: Pipeline) -> Iterator[None]:
        """Hold all weights of a pipeline's layers, while errors and gradients are worked out."""
        with ExitStack() as stack:
            for layer in pipeline.layers:
                stack.enter_context(whole(self.model, layer))
            yield

    def drawn_errors(
        self, pipeline: Pipeline, exact: Activations, known: KnownOutputs
    ) -> dict[int, Tensor]:
        """Each layer's error in this step's window, at this step's queries.

        Relative to the mean size of all workers' outputs, so that the mean over workers is the
        error of all their rows.
        """
        window = self.windows[self.done % len(self.windows)]
        positions = self._drawn(pipeline, window)
        return self.errors(pipeline, exact, positions, window, known, self.workers)

    def errors(
        self,
        pipeline: Pipeline,
        exact: Activations,
        positions: Tensor,
        window: int,
        known: KnownOutputs,
        workers: Workers = ALONE,
    ) -> dict[int, Tensor]:
        """Each layer's squared error at some positions, relative to its output's size: 0-dim.

        workers: over whom the size is averaged.
        """
        codes = self._codes(pipeline, exact)
        made = {}
        for layer in pipeline.layers:
            fold = self.folds[layer]
            key = (layer, self.plan.anchors, window, pipeline.group)
            if key not in known:
                attention = LayerAttention(fold, self.model, exact, positions)
                wanted = attention.exact()
                known[key] = attention, wanted, workers.all_mean(wanted.pow(2).sum())
            attention, wanted, mean_size = known[key]
            got = attention.folded(fold, codes, self.plan, window=window, quantised=self.quantised)
            size = mean_size.clamp_min(torch.finfo(wanted.dtype).tiny)
            made[layer] = (got - wanted).pow(2).sum() / size
        return made

    def _codes(self, pipeline: Pipeline, exact: Activations) -> Tensor:
        """Slots of the tokens behind the anchors, as their layers find them stored."""
        codes = pipeline.whole_slots(pipeline.records(exact), self.plan.anchors)
        kept = any(self.folds[layer].reading != "expanded" for layer in pipeline.layers)
        return pipeline.rounded_codes(codes) if self.quantised and kept else codes

    def _drawn(self, pipeline: Pipeline, window: int) -> Tensor:
        """The positions of a step's queries, in order."""
        first = first_with_history(self.plan.replace(window=window), pipeline, self.seq)
        order = drawn_order(self.seq - first, self.settings.seed * 1_000_003 + self.done)
        drawn = order[: self.settings.queries]
        device = next(pipeline.parameters()).device
        return (first + drawn.sort().values).to(device)

    def _require_finite(self, losses: dict[int, float]) -> None:
        wrong = [layer for layer, loss in losses.items() if not math.isfinite(loss)]
        if wrong:
            raise DivergedError(
                f"the loss of every layer must be finite; at step {self.done + 1} those of layers "
                f"{wrong} are not; {remedy_of(self.done, self.settings.learning_rate)}"
            )
