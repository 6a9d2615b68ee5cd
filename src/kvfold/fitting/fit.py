"""The fit of an add-on: closed form for maps, one pass over the text per stage, then the gates.

Every batch runs through the frozen model once, up to the last activation that is needed, and
goes into sums whose size does not depend on the text; then the weights follow by linear algebra.
Nothing is written to disk but a checkpoint, if one is asked for.

Positions below the plan's anchors are left out of the sums: they are kept exact and never read
from a code, and a first token's keys and values (an attention sink) are far from all others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID
from torch import Tensor, nn

from kvfold.anatomy import Anatomy, anatomy, text_decoder
from kvfold.errors import CorpusError, FitError
from kvfold.fitting.bar import progress_bar
from kvfold.fitting.checkpoint import job_digest, load_checkpoint, save_checkpoint
from kvfold.fitting.decay import set_kept
from kvfold.fitting.dispersion import DEFAULT_STRENGTH
from kvfold.fitting.frozen import frozen
from kvfold.fitting.gates import GateSettings, GateTrainer, train_gates, trainable
from kvfold.fitting.gram import exact_dtype
from kvfold.fitting.report import report_fit
from kvfold.fitting.ridge import DEFAULT_RIDGE
from kvfold.fitting.tasks import HasProblems, Task, stages, tasks_of_stage
from kvfold.fitting.workers import ALONE, Workers
from kvfold.methods import (
    Activations,
    Source,
    StateProjector,
    build_pipelines,
    build_state_projector,
    depth_methods,
)
from kvfold.plan import Plan
from kvfold.runtime.capture import capture
from kvfold.store.addon import AddOn
from kvfold.store.fingerprint import Fingerprint

GATES_STAGE = 2**20
"""The stage of a checkpoint that was written while gates were trained: behind all others."""
TOKENS_PER_BATCH = 1024
"""Enough rows for matrix products to run at full speed on a CPU, few enough to stay small."""


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
    batch: windows in one forward. checkpoint: a file to go on from and to write every
    `checkpoint_every` batches; it is deleted at the end. workers: the processes that run this same
    call, each with the whole text, of which it takes its share; all get the same add-on, and only
    the first shows bars and writes. The model is left as it was; the add-on has its dtype and
    device.

    Raises `PlanError` if the plan does not fit the model, `CorpusError` for too little text,
    `FitError` for non-finite activations, degenerate features, a foreign checkpoint or a lost
    worker.
    """
    shape = anatomy(model)
    pipelines, projector = build_pipelines(plan, shape), build_state_projector(plan, shape)
    fingerprint = Fingerprint.of(model)
    decoder = text_decoder(model)
    first = next(decoder.parameters())
    modules = nn.ModuleList([pipelines] if projector is None else [pipelines, projector])
    modules.to(first.device, torch.float64 if first.dtype == torch.float64 else torch.float32)
    _check_arguments(tokens, held_out, shape, ridge, batch, workers)
    batch = batch or max(1, TOKENS_PER_BATCH // max(1, tokens.shape[-1] if tokens.ndim else 1))
    gates = gates or GateSettings()
    job = _Job(
        model,
        shape,
        plan,
        pipelines,
        projector,
        tokens,
        ridge,
        key_dispersion,
        gates,
        batch,
        workers,
    )
    if checkpoint is not None:
        checkpoint = Path(checkpoint)
        job.checkpoint, job.checkpoint_every = checkpoint, checkpoint_every
        settings = (
            plan.to_json(),
            fingerprint.to_json(),
            f"{ridge!r} {key_dispersion!r} {gates} {batch}",
        )
        job.digest = job_digest(*settings, tokens=tokens)
    with frozen(model), progress_bar(progress and workers.first) as bar:
        report: dict[str, Any] = {"fit": job.run(bar)}
        report.update(job.train(bar))
        report.update(set_kept(model, plan, projector, tokens))
        if held_out is not None and len(held_out):
            report.update(report_fit(model, plan, pipelines, held_out, batch=batch))
    with torch.no_grad():
        for tensor in modules.state_dict().values():
            workers.all_of_first(tensor)
    if checkpoint is not None and workers.first:
        checkpoint.unlink(missing_ok=True)
    modules.to(first.dtype).requires_grad_(False)
    return AddOn(plan, pipelines, fingerprint, report, projector)


@dataclass
class _Job:
    """One fit: its settings, and where it is saved."""

    model: Any
    shape: Anatomy
    plan: Plan
    pipelines: nn.ModuleList
    projector: StateProjector | None
    tokens: Tensor
    ridge: float
    key_dispersion: float
    gates: GateSettings
    batch: int
    workers: Workers = ALONE
    checkpoint: Path | None = None
    checkpoint_every: int = 0
    digest: str = ""

    def run(self, bar: tuple[Progress, TaskID]) -> dict[str, Any]:
        """All stages; returns what the report says about the fit itself."""
        device = next(text_decoder(self.model).parameters()).device
        streaming = solving = 0.0
        windows = 0
        members: list[HasProblems] = list(depth_methods(self.pipelines))
        members += [] if self.projector is None else [self.projector]
        order = stages(members)
        saved = load_checkpoint(self.checkpoint, self.digest) if self.checkpoint else None
        place = (0, 0) if saved is None else (saved["stage"] + 1, saved["next_window"])
        self.workers.agree("checkpoint", *place)
        if saved is not None:
            self._load(saved)
        for number, stage in enumerate(order):
            if saved is not None and stage < saved["stage"]:
                continue
            tasks = tasks_of_stage(members, stage, self.shape, device, self.workers)
            check_enough(self.tokens, self.plan.anchors, tasks)
            begin = 0
            if saved is not None and stage == saved["stage"]:
                begin = int(saved["next_window"])
                for task, state in zip(tasks, saved["tasks"], strict=True):
                    task.load_state_dict(state)
                    if not self.workers.first:
                        task.clear()
            done = number * len(self.tokens) + begin
            bar[0].update(
                bar[1], total=len(order) * len(self.tokens), completed=done, rate="", visible=True
            )
            started = time.perf_counter()
            windows += self._pass(tasks, stage, begin, bar)
            streamed = time.perf_counter()
            for task in tasks:
                task.add_up(self.workers)
                task.solve(self.ridge, self.key_dispersion)
            streaming += streamed - started
            solving += time.perf_counter() - streamed
        seen = windows * self.tokens.shape[1] if windows else 0
        return {
            "tokens": self.tokens.numel(),
            "passes": len(order),
            "ridge": self.ridge,
            "key_dispersion": self.key_dispersion,
            "seconds": round(streaming, 3),
            "tokens_per_second": round(seen / streaming, 1) if seen else None,
            "solve_seconds": round(solving, 3),
        }

    def train(self, bar: tuple[Progress, TaskID]) -> dict[str, Any]:
        """The gates of the sequence axis; returns what the report says about them."""
        if not trainable(self.pipelines):
            return {}
        check_windows(self.tokens)
        seq, settings = self.tokens.shape[1], self.gates
        trainer = GateTrainer(self.model, self.shape, self.plan, self.pipelines, seq, settings)
        saved = load_checkpoint(self.checkpoint, self.digest) if self.checkpoint else None
        if saved is not None and "gates" in saved:
            self._load(saved)
            trainer.load_state_dict(saved["gates"])
        shown = bar[0].add_task("gates", total=settings.steps, completed=trainer.done, rate="")

        def after_step() -> None:
            error = trainer.mean_error
            bar[0].update(shown, completed=trainer.done, rate=f"error {error:.3f}")
            if self.checkpoint is not None and trainer.done % self.checkpoint_every == 0:
                self._save(GATES_STAGE, 0, [], gates=trainer.state_dict())

        started = time.perf_counter()
        train_gates(self.model, self.shape, [trainer], self.tokens, after_step)
        seconds = round(time.perf_counter() - started, 3)
        return {"gates": {**trainer.report(), "seconds": seconds}}

    def _pass(self, tasks: list[Task], stage: int, begin: int, bar: tuple[Progress, TaskID]) -> int:
        """One stage's pass over the text from window `begin`; returns the windows it took.

        In each round every worker takes in `batch` windows.
        """
        sources = frozenset[Source]().union(*(task.sources for task in tasks))
        started = time.perf_counter()
        each = self.batch * self.workers.count
        for count, start in enumerate(range(begin, len(self.tokens), each)):
            if count and self.checkpoint is not None and count % self.checkpoint_every == 0:
                self._save(stage, start, tasks)
            taken = self.tokens[start : start + each]
            ids = self.workers.share(taken)
            if len(ids):
                activations = self._activations(sources, ids)
                for task in tasks:
                    task.add(activations)
                del activations
            done = start + len(taken) - begin
            rate = done * self.tokens.shape[1] / (time.perf_counter() - started)
            bar[0].update(bar[1], advance=len(taken), rate=f"{rate:,.0f} tokens/s")
        return len(self.tokens) - begin

    def _activations(self, sources: frozenset[Source], ids: Tensor) -> Activations:
        captured = capture(self.model, self.shape, sources, ids)
        skip = self.plan.anchors
        return {source: exact_dtype(x[:, skip:]) for source, x in captured.items()}

    def _load(self, saved: dict[str, Any]) -> None:
        self.pipelines.load_state_dict(saved["pipelines"])
        if self.projector is not None:
            self.projector.load_state_dict(saved["projector"])

    def _save(self, stage: int, next_window: int, tasks: list[Task], **more: Any) -> None:
        """Write where the fit stands; sums of all workers are then the first one's alone."""
        assert self.checkpoint is not None
        for task in tasks:
            task.add_up(self.workers)
            if not self.workers.first:
                task.clear()
        if not self.workers.first:
            return
        state = {
            "stage": stage,
            "next_window": next_window,
            "pipelines": self.pipelines.state_dict(),
            "projector": {} if self.projector is None else self.projector.state_dict(),
            "tasks": [task.state_dict() for task in tasks],
        }
        save_checkpoint(self.checkpoint, self.digest, {**state, **more})


def _check_arguments(
    tokens: Tensor,
    held_out: Tensor | None,
    shape: Anatomy,
    ridge: float,
    batch: int | None,
    workers: Workers,
) -> None:
    if tokens.ndim and 0 < len(tokens) < workers.count:
        raise CorpusError(
            f"every worker must have text; got {len(tokens)} windows for {workers.count} workers; "
            "give a longer text or start fewer"
        )
    if not ridge >= 0:
        raise FitError(f"ridge must be at least 0; got {ridge}")
    if batch is not None and batch < 1:
        raise FitError(f"batch must be at least 1 window; got {batch}")
    for name, ids in (("tokens", tokens), ("held_out", held_out)):
        if (
            ids is not None
            and ids.numel()
            and not 0 <= int(ids.min()) <= int(ids.max()) < (shape.vocab_size)
        ):
            raise CorpusError(
                f"{name} must be ids from 0 to {shape.vocab_size - 1}; got {int(ids.min())} to "
                f"{int(ids.max())}; use the model's own tokenizer"
            )
    if held_out is not None and held_out.numel() and held_out.ndim != 2:
        raise CorpusError(
            f"held_out must be token windows of shape (windows, seq); got {tuple(held_out.shape)}"
        )


def check_windows(tokens: Tensor) -> None:
    """Raise `CorpusError` unless tokens are (windows, seq) with at least one token."""
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise CorpusError(
            "a fit needs token windows of shape (windows, seq) with at least one token; got "
            f"{tuple(tokens.shape)}; give it a longer text"
        )


def check_enough(tokens: Tensor, anchors: int, tasks: Sequence[Task]) -> None:
    """Raise `CorpusError` unless the text has a row for every unknown of each task."""
    check_windows(tokens)
    rows = tokens.shape[0] * max(0, tokens.shape[1] - anchors)
    needed = max(task.unknowns for task in tasks)
    if rows < needed:
        raise CorpusError(
            f"a fit of {needed} unknowns per output needs at least as many tokens beyond the "
            f"{anchors} anchors of each window; got {rows} in {tokens.shape[0]} windows of "
            f"{tokens.shape[1]}; give it a longer text"
        )
