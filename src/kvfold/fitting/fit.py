"""The fit of an add-on: maps and codes in closed form, then pooling gates by training.

Refining and distilling an add-on further is what recipes are for: see `kvfold.fitting.stages`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kvfold.anatomy import Anatomy, anatomy, text_decoder
from kvfold.errors import CorpusError, FitError
from kvfold.fitting.bar import progress_bar
from kvfold.fitting.checkpoint import Checkpoint, job_digest
from kvfold.fitting.closed_form import (
    ClosedForm,
    ClosedFormSettings,
    check_windows,
    default_batch,
)
from kvfold.fitting.dispersion import DEFAULT_STRENGTH
from kvfold.fitting.frozen import frozen
from kvfold.fitting.gates import GateSettings, GateTrainer, drawn_row, trainable
from kvfold.fitting.gates_stage import run_gates
from kvfold.fitting.inputs import check_ids, check_mode
from kvfold.fitting.report import report_fit
from kvfold.fitting.ridge import DEFAULT_RIDGE
from kvfold.fitting.wide import wide, wide_dtype
from kvfold.fitting.workers import ALONE, Workers
from kvfold.methods import build_lora, build_pipelines, build_state_projector
from kvfold.plan import Plan
from kvfold.runtime.adapters import check_projections
from kvfold.store.addon import AddOn
from kvfold.store.fingerprint import Fingerprint

GATES_STAGE = 2**20
"""The stage of a checkpoint that was written while gates were trained: behind all others."""


def fit(
    model: Any,
    plan: Plan,
    tokens: Tensor,
    held_out: Tensor | None = None,
    *,
    ridge: float = DEFAULT_RIDGE,
    key_dispersion: float = DEFAULT_STRENGTH,
    gates: GateSettings | None = None,
    batch: int | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 8,
    progress: bool = True,
    workers: Workers = ALONE,
) -> AddOn:
    """Fit a plan to a frozen model: maps and codes in closed form, then pooling gates by training.

    tokens: (windows, seq) ids without padding. held_out: likewise; if given, the add-on's report
    has R^2 and attention-output cosine on them. ridge: see `kvfold.fitting.ridge`.
    key_dispersion: see `kvfold.fitting.dispersion`; 0 for plain least squares. gates: how pooling
    gates are trained, see `kvfold.fitting.gates`; they want windows of 1,024 tokens or more.
    Low-rank terms (the plan's lora) are left at their start, which changes nothing. batch: windows
    in one forward. checkpoint: a file to go on from and to write every
    `checkpoint_every` batches; it is deleted at the end. workers: the processes that run this same
    call, each with the whole text, of which it takes its share; all get the same add-on, and only
    the first shows bars and writes. The model is left as it was; the add-on has its dtype and
    device.

    Raises `PlanError` if the plan does not fit the model, `CorpusError` for too little text,
    `FitError` for non-finite activations, degenerate features, a foreign checkpoint or a lost
    worker.
    """
    shape = anatomy(model)
    _check_arguments(tokens, held_out, shape, batch)
    addon = _zero_weights(model, plan, shape)
    settings, gates = ClosedFormSettings(ridge, key_dispersion), gates or GateSettings()
    batch = batch or default_batch(tokens)
    words = f"{ridge!r} {key_dispersion!r} {gates} {batch}"
    path = None if checkpoint is None else Path(checkpoint)
    job = (
        ""
        if path is None
        else job_digest(plan.to_json(), addon.base.to_json(), words, tokens=tokens)
    )
    saves = Checkpoint(path, job, checkpoint_every, workers)
    solver = ClosedForm(model, addon, tokens, settings, saves, batch, workers)
    with wide(addon, model), frozen(model), progress_bar(progress and workers.first) as bar:
        addon.report.update(solver.run(bar))
        if trainable(addon.pipelines):
            check_windows(tokens)
            seq = tokens.shape[1]
            trainer = GateTrainer(model, shape, plan, addon.pipelines, seq, gates, workers)
            row = partial(drawn_row, tokens, gates.seed)
            beside = partial(solver.state, GATES_STAGE)
            addon.report["gates"] = run_gates(trainer, row, bar, saves, beside)
        if held_out is not None and len(held_out):
            addon.report.update(report_fit(model, plan, addon.pipelines, held_out, batch=batch))
    saves.remove()
    return addon


def _zero_weights(model: Any, plan: Plan, shape: Anatomy) -> AddOn:
    """The plan's methods, made in the dtype that they are fitted in."""
    lora = build_lora(plan, shape)
    if lora is not None:
        check_projections(model, lora)
    made = AddOn(
        plan,
        build_pipelines(plan, shape),
        Fingerprint.of(model),
        {},
        build_state_projector(plan, shape),
        lora,
    )
    return made.to(next(text_decoder(model).parameters()).device, wide_dtype(model))


def _check_arguments(
    tokens: Tensor, held_out: Tensor | None, shape: Anatomy, batch: int | None
) -> None:
    check_mode()
    if batch is not None and batch < 1:
        raise FitError(f"batch must be at least 1 window; got {batch}")
    check_ids(shape, "tokens", tokens)
    if held_out is not None:
        check_ids(shape, "held_out", held_out)
    if held_out is not None and held_out.numel() and held_out.ndim != 2:
        raise CorpusError(
            f"held_out must be token windows of shape (windows, seq); got {tuple(held_out.shape)}"
        )
