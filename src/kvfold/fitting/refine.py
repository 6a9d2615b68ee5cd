"""Refine: all that an add-on has goes down on attention output, on text, layer by layer.

The second stage of a fit. Closed forms give the best maps for keys and values; what a layer feels
is its attention's output. So the maps of the depth axis, their residual MLPs, gates and logit
biases are moved together until that is right, each pipeline alone (`kvfold.fitting.descent`), on
slots as the plan stores them, quantised ones included, with straight-through gradients.

Every so many steps the error is measured on held-out text, and each pipeline keeps the weights
that it was best with there: a pipeline with nothing to win stays as it was. One that has not
improved for a while is left alone from then on. Several workers share the rows of each batch, and
the held-out rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from kvfold.anatomy import anatomy
from kvfold.errors import CorpusError, DivergedError, FitError
from kvfold.fitting.attention_output import first_with_history
from kvfold.fitting.bar import progress_bar
from kvfold.fitting.checkpoint import Checkpoint, job_digest
from kvfold.fitting.descent import AttentionDescent, Descent, check_history, remedy_of
from kvfold.fitting.frozen import frozen
from kvfold.fitting.gram import exact_dtype
from kvfold.fitting.inputs import check_text
from kvfold.fitting.json_lines import Log
from kvfold.fitting.mixture import Mixture
from kvfold.fitting.parts import PARTS, Part, check_parts, parameters_of, units
from kvfold.fitting.shared_steps import require_even, require_even_looks, summed
from kvfold.fitting.weight_scales import start_weights, weight_groups
from kvfold.fitting.wide import wide
from kvfold.fitting.workers import ALONE, Workers
from kvfold.methods import Activations, Pipeline
from kvfold.runtime.capture import capture
from kvfold.runtime.reading import choose_readings
from kvfold.store.addon import AddOn

LOOK_QUERIES = 128
"""Queries of a held-out row, evenly spread over those that have a history."""
LOOK_ROWS = 8
"""Held-out rows whose activations are kept: about 60 kB a token for 15 layers of 576 values."""
CLEAR = 1e-3
"""A held-out error lower by less than this share of itself does not prove that more will come."""
MEASURED_BATCHES = 4
"""Batches of text that the scales of weights are measured on."""


@dataclass(frozen=True)
class RefineSettings(Descent):
    """How an add-on is refined; beside what `Descent` says:

    learning_rate: relative to what each weight's output spreads by, see
    `kvfold.fitting.weight_scales`. rows: of the mixture in a batch. parts: which are trained, of
    `maps`, `residual`, `gates` and `biases`. look_every: steps between two looks at held-out
    text. patience: looks without a clear gain after which a pipeline is left alone; most of a
    run's, since maps that are near their best gain only when the rate has fallen.
    """

    steps: int = 256
    moves: int = 8
    learning_rate: float = 2e-3
    queries: int = 128
    rows: int = 1
    parts: tuple[Part, ...] = PARTS
    look_every: int = 32
    patience: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts)
        for name in ("rows", "look_every", "patience"):
            if getattr(self, name) < 1:
                raise FitError(f"{name} must be at least 1; got {getattr(self, name)}")


def refine(
    model: Any,
    addon: AddOn,
    mixture: Mixture,
    held_out: Tensor,
    settings: RefineSettings,
    *,
    checkpoint: Path | None = None,
    checkpoint_every: int = 16,
    log: Log | None = None,
    progress: bool = True,
    workers: Workers = ALONE,
) -> dict[str, Any]:
    """Refine an add-on in place; returns what it brought, as plain data.

    mixture: text to train on. held_out: (windows, seq) ids without padding, of which the first
    `LOOK_ROWS` are used. checkpoint: a file to go on from, to the exact step, and to write every
    `checkpoint_every` steps; it is deleted at the end. log: called at each look with one mapping,
    a line of a JSON-lines log. workers: those that make this same call; they share the rows, all
    end with the same weights, and only the first logs and writes. The report has the steps taken
    and the held-out error (squared, relative) before and after, as a mean over layers and by
    layer; empty if nothing was trained.

    Weights are float32 while they move (float64 in a float64 model). If it is interrupted the
    add-on has the best weights so far. Raises `AddOnError` for another base model, `CorpusError`
    for rows without a history, `FitError` for losses that are not finite, rows that can't be
    shared out evenly, a lost worker or a foreign checkpoint.
    """
    addon.check_base(model)
    check_text(model, mixture, held_out)
    _check_held_out(held_out)
    trained = units(list(addon.pipelines), settings.parts)  # type: ignore[arg-type]
    if not trained or settings.steps == 0:
        return {}
    require_even(workers, settings.rows, "refining")
    require_even_looks(workers, model, min(len(held_out), LOOK_ROWS))
    shown = progress and workers.first
    with wide(addon, model), frozen(model), progress_bar(shown) as (bar, _):
        digest = _digest(addon, mixture, held_out, settings)
        saves = Checkpoint(checkpoint, digest, checkpoint_every, workers)
        run = Refinement(model, addon, mixture, held_out, settings, trained, saves)
        try:
            run.go(bar, log if workers.first else None)
        finally:
            run.keep_best()
    saves.remove()
    return {**run.report(), "seconds": round(saves.seconds, 3)}


def _check_held_out(held_out: Tensor) -> None:
    if held_out.ndim != 2 or held_out.numel() == 0:
        raise CorpusError(
            "held_out must be token windows of shape (windows, seq), at least one; got "
            f"{tuple(held_out.shape)}; the best weights are chosen on it"
        )


@dataclass
class _Unit:
    """Pipelines that share weights (most often one alone), and the best that they have been.

    errors: of each layer when it was looked at first. since: looks since the last clear gain.
    """

    pipelines: list[Pipeline]
    weights: dict[str, torch.nn.Parameter]
    errors: dict[int, float] = field(default_factory=dict)
    best: dict[int, float] = field(default_factory=dict)
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    since: int = 0

    @property
    def least(self) -> float:
        """The lowest mean error."""
        return sum(self.best.values()) / len(self.best) if self.best else math.inf

    def looked(self, errors: dict[int, float]) -> None:
        """Take in held-out errors by layer."""
        found = sum(errors.values()) / len(errors)
        if not self.best and not math.isfinite(found):
            raise DivergedError(
                f"the held-out error of layers {sorted(errors)} must be finite before the first "
                f"step; it comes to {found}; {remedy_of(0, 0.0)}"
            )
        clear = not self.best or found < (1 - CLEAR) * self.least
        self.since = 0 if clear else self.since + 1
        if not self.errors:
            self.errors = errors
        if found < self.least:
            self.best = errors
            self.best_weights = {n: w.detach().clone() for n, w in self.weights.items()}

    @torch.no_grad()
    def keep_best(self) -> None:
        """Go back to the best weights."""
        for name, weight in self.best_weights.items():
            self.weights[name].copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Everything, the weights as they stand included."""
        return {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "errors": self.errors,
            "best": self.best,
            "best_weights": self.best_weights,
            "since": self.since,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        self.errors, self.best = dict(state["errors"]), dict(state["best"])
        self.best_weights = {n: w.to(self.weights[n]) for n, w in state["best_weights"].items()}
        self.since = int(state["since"])


class Refinement:
    """One run: what is trained, where it stands and where it is saved."""

    def __init__(
        self,
        model: Any,
        addon: AddOn,
        mixture: Mixture,
        held_out: Tensor,
        settings: RefineSettings,
        trained: list[list[Pipeline]],
        saves: Checkpoint,
    ) -> None:
        self.model, self.plan, self.mixture, self.settings = model, addon.plan, mixture, settings
        self.shape = anatomy(model)
        self.held_out = held_out[:LOOK_ROWS]
        self.saves, self.workers = saves, saves.workers
        self.units = [_unit(members, settings.parts) for members in trained]
        pipelines = [pipeline for unit in self.units for pipeline in unit.pipelines]
        for unit in self.units:
            for weight in unit.weights.values():
                weight.requires_grad_(True)
        self.descent = AttentionDescent(
            model,
            self.shape,
            self.plan,
            pipelines,
            mixture.seq,
            settings,
            weight_groups(pipelines, settings.parts),
            choose_readings(self.plan, pipelines, self.shape),
            self.workers,
        )
        windows = self.descent.windows
        check_history(self.shape, self.plan, pipelines, windows, held_out.shape[1])
        self.looked_at: list[Activations] = []

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.descent.done

    def go(self, bar: Progress, log: Log | None) -> None:
        """All steps that are left, with looks at held-out text between them."""
        settings = self.settings
        self._begin(log)
        shown = bar.add_task("refine", total=settings.steps, completed=self.step, rate="")
        exact: Activations = {}
        while self.step < settings.steps and self._training():
            if not exact or self.step % settings.moves == 0:
                exact = self._captured(self.workers.share(self._rows(self.step // settings.moves)))
            self.descent.step(exact, {}, self._training())
            if self.step % settings.look_every == 0 or self.step == settings.steps:
                self._look(log)
            if self.saves.due(self.step):
                self.saves.save(self._state_dict())
            bar.update(shown, completed=self.step, rate=f"error {self._least():.4f}")

    def _begin(self, log: Log | None) -> None:
        """Go on from a checkpoint, or measure weights and errors before the first step."""
        saved = self.saves.load()
        if saved is not None:
            self.descent.load_state_dict(saved["descent"])
            for unit, state in zip(self.units, saved["units"], strict=True):
                unit.load_state_dict(state)
            return
        batches = [self._captured(self._rows(number)) for number in range(MEASURED_BATCHES)]
        pipelines, groups = self.descent.pipelines, self.descent.optimizer.param_groups
        start_weights(pipelines, groups, batches, self.plan.anchors, self.settings.seed)
        self.descent.start_alike()
        self._look(log)

    def _training(self) -> list[Pipeline]:
        """The pipelines that still move."""
        active = [unit for unit in self.units if unit.since < self.settings.patience]
        return [pipeline for unit in active for pipeline in unit.pipelines]

    def _rows(self, number: int) -> Tensor:
        return self.mixture.batch(number, self.settings.rows)

    def _captured(self, ids: Tensor) -> Activations:
        captured = capture(self.model, self.shape, self.descent.sources, ids)
        return {source: exact_dtype(x) for source, x in captured.items()}

    @torch.no_grad()
    def _look(self, log: Log | None) -> None:
        """Measure the held-out error of every pipeline that still moves."""
        if not self.looked_at:
            sources = self.descent.sources
            self.looked_at = [
                capture(self.model, self.shape, sources, ids[None])
                for ids in self.workers.share(self.held_out)
            ]
        training = self._training()
        found = {layer: 0.0 for pipeline in training for layer in pipeline.layers}
        for captured in self.looked_at:
            exact = {source: exact_dtype(x) for source, x in captured.items()}
            for pipeline in training:
                for window in self.descent.windows:
                    positions = self._spread_positions(pipeline, window)
                    with self.descent.whole_layers(pipeline):
                        errors = self.descent.errors(pipeline, exact, positions, window, {})
                    for layer, error in errors.items():
                        found[layer] += float(error)
        found = dict(zip(found, summed(self.workers, list(found.values())), strict=True))
        looks = len(self.held_out) * len(self.descent.windows)
        for unit in self.units:
            if unit.pipelines[0] in training:
                layers = [layer for pipeline in unit.pipelines for layer in pipeline.layers]
                unit.looked({layer: found[layer] / looks for layer in layers})
        self._say(log, {layer: error / looks for layer, error in found.items()})

    def _spread_positions(self, pipeline: Pipeline, window: int) -> Tensor:
        seq = self.held_out.shape[1]
        first = first_with_history(self.plan.replace(window=window), pipeline, seq)
        count = min(LOOK_QUERIES, seq - first)
        device = next(pipeline.parameters()).device
        return torch.linspace(first, seq - 1, count, dtype=torch.float64).long().to(device)

    def _least(self) -> float:
        layers = [error for unit in self.units for error in unit.best.values()]
        return sum(layers) / len(layers)

    def _say(self, log: Log | None, found: dict[int, float]) -> None:
        """One line of the log; the errors of the steps since the last one are then forgotten."""
        steps = [error for step in self.descent.losses for error in step.values()]
        self.descent.losses.clear()
        if log is not None:
            log(
                {
                    "stage": "refine",
                    "step": self.step,
                    "learning_rate": self.settings.rate(self.step),
                    "train_error": sum(steps) / len(steps) if steps else None,
                    "held_out_error": sum(found.values()) / len(found),
                    "best_held_out_error": self._least(),
                    "layers_in_training": len(found),
                }
            )

    def keep_best(self) -> None:
        """Give every pipeline its best weights."""
        for unit in self.units:
            unit.keep_best()

    def _state_dict(self) -> dict[str, Any]:
        return {
            "descent": self.descent.state_dict(),
            "units": [unit.state_dict() for unit in self.units],
        }

    def report(self) -> dict[str, Any]:
        """What the run brought, as plain data."""
        before = {n: error for unit in self.units for n, error in unit.errors.items()}
        after = {n: error for unit in self.units for n, error in unit.best.items()}
        return {
            "steps": self.step,
            "parts": list(self.settings.parts),
            "windows": list(self.descent.windows),
            "learning_rate": self.settings.learning_rate,
            "held_out_error": {
                "before": round(sum(before.values()) / len(before), 6),
                "after": round(sum(after.values()) / len(after), 6),
            },
            "layers": {
                str(layer): {"before": round(before[layer], 6), "after": round(after[layer], 6)}
                for layer in sorted(before)
            },
        }


def _unit(pipelines: list[Pipeline], parts: tuple[Part, ...]) -> _Unit:
    weights = {
        f"{number}.{name}": weight
        for number, pipeline in enumerate(pipelines)
        for name, weight in parameters_of(pipeline, parts).items()
    }
    return _Unit(pipelines, weights)


def _digest(addon: AddOn, mixture: Mixture, held_out: Tensor, settings: RefineSettings) -> str:
    """A digest of the job: the add-on's weights as they come in, text and settings."""
    job = (addon.plan.to_json(), addon.base.to_json(), repr(settings), mixture.digest())
    digest = job_digest(*job, tokens=held_out)
    for name, weight in addon.pipelines.named_parameters():
        digest = job_digest(digest, name, tokens=weight.detach())
    return digest
