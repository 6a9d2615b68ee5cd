"""Training of pooling gates, each layer alone, on the frozen model.

The gates and logit biases of a plan go down on attention output (`kvfold.fitting.descent`); maps
of the depth axis stay as they were fitted, and slots are not quantised, so that plans that differ
in bits alone share their gates. This is the per-layer form of the training in the second model
card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.anatomy import Anatomy
from kvfold.fitting.descent import LEAST_SEQ, AttentionDescent, Descent, KnownOutputs
from kvfold.fitting.gram import exact_dtype
from kvfold.fitting.seeds import drawn_order
from kvfold.fitting.workers import ALONE, Workers
from kvfold.methods import Activations, Pipeline, PoolGate, Source
from kvfold.plan import Plan
from kvfold.runtime.capture import capture

__all__ = ["LEAST_SEQ", "GateSettings", "GateTrainer", "gate_of", "train_gates", "trainable"]


@dataclass(frozen=True)
class GateSettings(Descent):
    """How gates are trained; see `Descent`. A batch is one row of the text for each worker."""

    steps: int = 128
    moves: int = 4
    learning_rate: float = 3e-2
    queries: int = 128


def trainable(pipelines: nn.ModuleList) -> list[Pipeline]:
    """The pipelines whose gates have weights."""
    members: list[Pipeline] = list(pipelines)  # type: ignore[arg-type]
    gated = [pipeline for pipeline in members if pipeline.sequence is not None]
    return [pipeline for pipeline in gated if any(True for _ in gate_of(pipeline).parameters())]


def gate_of(pipeline: Pipeline) -> PoolGate:
    """The gate of a pipeline that has one."""
    assert pipeline.sequence is not None
    return pipeline.sequence


def train_gates(
    model: Any,
    shape: Anatomy,
    trainers: Sequence[GateTrainer],
    row: Callable[[int], Tensor],
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Every step that is left of some trainers of equal settings, one forward a row for all.

    row: the n-th row of the text, (1, seq) ids without padding; `moves` steps use one row.
    """
    settings = trainers[0].settings
    sources = frozenset[Source]().union(*(trainer.sources for trainer in trainers))
    exact: dict[Source, Tensor] = {}
    for number in range(min(trainer.done for trainer in trainers), settings.steps):
        if not exact or number % settings.moves == 0:
            captured = capture(model, shape, sources, row(number // settings.moves))
            exact = {source: exact_dtype(x) for source, x in captured.items()}
        known: KnownOutputs = {}
        for trainer in trainers:
            trainer.step(exact, known)
        after_step()


def drawn_row(tokens: Tensor, seed: int, number: int) -> Tensor:
    """The n-th row of a text, (1, seq): each once in a drawn order, then again in another.

    tokens: (windows, seq).
    """
    turn, place = divmod(number, len(tokens))
    chosen = int(drawn_order(len(tokens), seed + turn)[place])
    return tokens[chosen : chosen + 1]


class GateTrainer:
    """The gates of one plan in training; `step` takes the activations of one row of text.

    pipelines: the plan's, with fitted depth maps, in float32 or float64. seq: tokens of a row.
    workers: those that take the same steps, each on rows of its own; gradients are averaged.
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
        workers: Workers = ALONE,
    ) -> None:
        self.settings = settings
        self.pipelines = trainable(pipelines)
        groups = []
        for pipeline in self.pipelines:
            pipeline.depth.requires_grad_(False)
            gate_of(pipeline).requires_grad_(True)
            groups.extend(gate_groups(gate_of(pipeline)))
        self.descent = AttentionDescent(
            model, shape, plan, self.pipelines, seq, settings, groups, workers=workers
        )
        self.sources = self.descent.sources

    @property
    def done(self) -> int:
        """Steps taken."""
        return self.descent.done

    @property
    def mean_error(self) -> float:
        """The last step's relative error, the mean over layers."""
        last = self.descent.losses[-1]
        return sum(last.values()) / len(last)

    def state_dict(self) -> dict[str, Any]:
        """All that another trainer of the same job needs to go on."""
        gates = [gate_of(pipeline).state_dict() for pipeline in self.pipelines]
        return {**self.descent.state_dict(), "gates": gates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another trainer was."""
        for pipeline, gate in zip(self.pipelines, state["gates"], strict=True):
            gate_of(pipeline).load_state_dict(gate)
        self.descent.load_state_dict(state)

    def step(self, exact: Activations, known: KnownOutputs) -> None:
        """One move of every gate. exact: `sources` of one row, in float32 or float64.

        known: what other trainers have computed of this row already; added to.
        """
        if self.done == 0:
            self._scale_to_inputs(exact)
            self._start_biases(exact, known)
            self.descent.start_alike()
        self.descent.step(exact, known)

    @torch.no_grad()
    def _scale_to_inputs(self, exact: Activations) -> None:
        """Let a step of Adam move scores equally far in every layer, however large its inputs.

        Inputs of attention have another root mean square in each layer (0.05 to 1 in one model),
        and a step moves each weight by the learning rate.
        """
        scoring = self.descent.optimizer.param_groups[::2]
        for pipeline, group in zip(self.pipelines, scoring, strict=True):
            group["scale"] = score_scale(pipeline, exact)
            for weight in group["params"]:
                weight.mul_(group["scale"])

    @torch.no_grad()
    def _start_biases(self, exact: Activations, known: KnownOutputs) -> None:
        """Start the logit bias of slots at 0 or at log r, whichever fits the first window."""
        for pipeline in self.pipelines:
            gate = gate_of(pipeline)
            if not gate.mass:
                continue
            found = []
            for start in (0.0, math.log(gate.group)):
                for bias in gate.mass.values():
                    bias.fill_(start)
                with self.descent.whole_layers(pipeline):
                    errors = self.descent.drawn_errors(pipeline, exact, known)
                found.append((sum(float(error) for error in errors.values()), start))
            for bias in gate.mass.values():
                bias.fill_(min(found)[1])

    def report(self) -> dict[str, Any]:
        """Mean relative error of the first and of the last tenth of the steps, by layer."""
        losses = self.descent.losses
        tenth = max(1, len(losses) // 10)
        parts = {"first": losses[:tenth], "last": losses[-tenth:]}
        return {
            "steps": self.done,
            "windows": list(self.descent.windows),
            "learning_rate": self.settings.learning_rate,
            "error": {
                name: {
                    str(layer): round(sum(step[layer] for step in steps) / len(steps), 6)
                    for layer in sorted(self.descent.folds)
                }
                for name, steps in parts.items()
                if steps
            },
        }


def gate_groups(gate: PoolGate) -> list[dict[str, Any]]:
    """What scores tokens by their inputs, whose step depends on the inputs' size, and the rest."""
    scoring = [] if gate.score is None else list(gate.score.parameters())
    known = {id(parameter) for parameter in scoring}
    rest = [parameter for parameter in gate.parameters() if id(parameter) not in known]
    return [{"params": scoring}, {"params": rest}]


def score_scale(pipeline: Pipeline, exact: Activations) -> float:
    """One over the root mean square of what a gate scores tokens by."""
    rms = float(pipeline.gate_input(exact).double().pow(2).mean().sqrt())
    return 1.0 / rms if rms > 0 else 1.0
