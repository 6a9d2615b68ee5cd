"""The training of pooling gates as a stage: on its own, or as the second half of `fit`.

`kvfold.fitting.gates` has the training itself; here are its checkpoint, its log and its bar.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID
from torch import Tensor

from kvfold.anatomy import Anatomy, anatomy
from kvfold.errors import FitError
from kvfold.fitting.bar import progress_bar
from kvfold.fitting.checkpoint import Checkpoint, job_digest
from kvfold.fitting.frozen import frozen
from kvfold.fitting.gates import GateSettings, GateTrainer, train_gates, trainable
from kvfold.fitting.inputs import check_text
from kvfold.fitting.json_lines import Log
from kvfold.fitting.mixture import Mixture
from kvfold.fitting.wide import wide
from kvfold.fitting.workers import ALONE, Workers
from kvfold.methods import build_pipelines
from kvfold.plan import Plan
from kvfold.store.addon import AddOn


def train_gates_stage(
    model: Any,
    addon: AddOn,
    mixture: Mixture,
    held_out: Tensor,
    settings: GateSettings,
    *,
    checkpoint: Path | None = None,
    checkpoint_every: int = 16,
    log: Log | None = None,
    progress: bool = True,
    workers: Workers = ALONE,
) -> dict[str, Any]:
    """Train the gates of an add-on in place, its maps as they are; returns the report's `gates`.

    mixture: of rows of 1,024 tokens or more. held_out: not used; each layer is trained for as many
    steps as were asked for. checkpoint: a file to go on from and to write every `checkpoint_every`
    steps; it is deleted at the end. log: called with one line a step. workers: those that make
    this same call. Each takes rows of its own, so that a step sees as many rows as there are
    workers; only the first logs and writes. Raises `FitError` for a plan without gates to train, a
    loss that is not finite, a lost worker or a foreign checkpoint, and `CorpusError` for rows
    without a history.
    """
    shape = anatomy(model)
    check_text(model, mixture, held_out)
    require_gates(addon.plan, shape, settings)
    weights = [str(float(weight.double().sum())) for weight in addon.parameters()]
    job = job_digest(
        addon.plan.to_json(), addon.base.to_json(), repr(settings), mixture.digest(), *weights,
        tokens=mixture.batch(0, 1),
    )  # fmt: skip
    kept = Checkpoint(checkpoint, job, checkpoint_every, workers)
    shown = progress and workers.first
    with wide(addon, model), frozen(model), progress_bar(shown) as bar:
        trainer = GateTrainer(
            model, shape, addon.plan, addon.pipelines, mixture.seq, settings, workers
        )
        report = run_gates(trainer, lambda number: mixture.batch(number, 1), bar, kept, dict, log)
    kept.remove()
    return report


def require_gates(plan: Plan, shape: Anatomy, _: GateSettings) -> None:
    """Raise `FitError` unless the plan has gates with weights."""
    with torch.device("meta"):
        gated = trainable(build_pipelines(plan, shape))
    if not gated:
        raise FitError(
            "the gates stage is for plans that pool tokens by a trained gate; this plan has none; "
            "leave the stage out, or add a pool entry with a gate other than mean"
        )


def run_gates(
    trainer: GateTrainer,
    row: Callable[[int], Tensor],
    bar: tuple[Progress, TaskID],
    checkpoint: Checkpoint,
    beside: Callable[[], dict[str, Any]],
    log: Log | None = None,
) -> dict[str, Any]:
    """Every step that is left of a training; returns what the report says about it.

    row: see `train_gates`; the trainer's workers take rows in turn. checkpoint: what it holds of
    gates is loaded first. beside: what a checkpoint must hold beside the trainer's state.
    """
    saved, earlier = checkpoint.load(), 0.0
    if saved is not None and "gates" in saved:
        trainer.load_state_dict(saved["gates"])
        earlier = float(saved["gates_seconds"])
    started = time.perf_counter()

    def seconds() -> float:
        return earlier + time.perf_counter() - started

    workers = trainer.descent.workers
    shown = bar[0].add_task("gates", total=trainer.settings.steps, completed=trainer.done, rate="")

    def after_step() -> None:
        error = trainer.mean_error
        bar[0].update(shown, completed=trainer.done, rate=f"error {error:.3f}")
        if log is not None and workers.first:
            log({"step": trainer.done, "error": error})
        if checkpoint.due(trainer.done):
            gates = {"gates": trainer.state_dict(), "gates_seconds": seconds()}
            checkpoint.save({**beside(), **gates})

    def own_row(number: int) -> Tensor:
        return row(number * workers.count + workers.rank)

    train_gates(trainer.descent.model, trainer.descent.shape, [trainer], own_row, after_step)
    return {**trainer.report(), "seconds": round(seconds(), 3)}
