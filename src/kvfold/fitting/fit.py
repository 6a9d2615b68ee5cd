"""The closed-form fit of an add-on: one pass over the text per stage.

Every batch runs through the frozen model once, up to the last activation that is needed, and
goes into sums whose size does not depend on the text; then the weights follow by linear algebra.
Nothing is written to disk but a checkpoint, if one is asked for.

Positions below the plan's anchors are left out of the sums: they are kept exact and never read
from a code, and a first token's keys and values (an attention sink) are far from all others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn

from kvfold.anatomy import Anatomy, anatomy, text_decoder
from kvfold.errors import CorpusError, FitError
from kvfold.fitting.checkpoint import job_digest, load_checkpoint, save_checkpoint
from kvfold.fitting.dispersion import DEFAULT_STRENGTH
from kvfold.fitting.gram import exact_dtype
from kvfold.fitting.report import report_fit
from kvfold.fitting.ridge import DEFAULT_RIDGE
from kvfold.fitting.tasks import Task, stages, tasks_of_stage
from kvfold.methods import Activations, DepthMethod, Source, build_methods
from kvfold.plan import Plan
from kvfold.runtime.capture import capture
from kvfold.store.addon import AddOn
from kvfold.store.fingerprint import Fingerprint

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
    batch: int | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 8,
    progress: bool = True,
) -> AddOn:
    """Fit a plan's maps and codes to a frozen model, in closed form.

    tokens: (windows, seq) ids without padding. held_out: likewise; if given, the add-on's report
    has R^2 and attention-output cosine on them. ridge: see `kvfold.fitting.ridge`.
    key_dispersion: see `kvfold.fitting.dispersion`; 0 for plain least squares. batch: windows
    in one forward. checkpoint: a file to go on from and to write every `checkpoint_every`
    batches; it is deleted at the end. The model is left as it was; the add-on has its dtype and
    device.

    Raises `PlanError` if the plan does not fit the model, `CorpusError` for too little text,
    `FitError` for non-finite activations, degenerate features or a foreign checkpoint.
    """
    shape = anatomy(model)
    methods = build_methods(plan, shape)
    fingerprint = Fingerprint.of(model)
    decoder = text_decoder(model)
    first = next(decoder.parameters())
    methods.to(first.device, torch.float64 if first.dtype == torch.float64 else torch.float32)
    _check_arguments(tokens, held_out, shape, ridge, batch)
    batch = batch or max(1, TOKENS_PER_BATCH // max(1, tokens.shape[-1] if tokens.ndim else 1))
    job = _Job(model, shape, plan, methods, tokens, ridge, key_dispersion, batch)
    if checkpoint is not None:
        checkpoint = Path(checkpoint)
        job.checkpoint, job.checkpoint_every = checkpoint, checkpoint_every
        settings = (plan.to_json(), fingerprint.to_json(), f"{ridge!r} {key_dispersion!r} {batch}")
        job.digest = job_digest(*settings, tokens=tokens)
    with _frozen(model), _bar(progress) as bar:
        report: dict[str, Any] = {"fit": job.run(bar)}
        if held_out is not None and len(held_out):
            report.update(report_fit(model, plan, methods, held_out, batch=batch))
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    methods.to(first.dtype).requires_grad_(False)
    return AddOn(plan, methods, fingerprint, report)


@dataclass
class _Job:
    """One fit: its settings, and where it is saved."""

    model: Any
    shape: Anatomy
    plan: Plan
    methods: nn.ModuleList
    tokens: Tensor
    ridge: float
    key_dispersion: float
    batch: int
    checkpoint: Path | None = None
    checkpoint_every: int = 0
    digest: str = ""

    def run(self, bar: tuple[Progress, TaskID]) -> dict[str, Any]:
        """All stages; returns what the report says about the fit itself."""
        device = next(text_decoder(self.model).parameters()).device
        streaming = solving = 0.0
        windows = 0
        members: list[DepthMethod] = list(self.methods)  # type: ignore[arg-type]
        order = stages(members)
        saved = load_checkpoint(self.checkpoint, self.digest) if self.checkpoint else None
        if saved is not None:
            self.methods.load_state_dict(saved["methods"])
        for number, stage in enumerate(order):
            if saved is not None and stage < saved["stage"]:
                continue
            tasks = tasks_of_stage(members, stage, self.shape, device)
            _check_enough(self.tokens, self.plan.anchors, tasks)
            begin = 0
            if saved is not None and stage == saved["stage"]:
                begin = int(saved["next_window"])
                for task, state in zip(tasks, saved["tasks"], strict=True):
                    task.load_state_dict(state)
            done = number * len(self.tokens) + begin
            bar[0].update(
                bar[1], total=len(order) * len(self.tokens), completed=done, rate="", visible=True
            )
            started = time.perf_counter()
            windows += self._pass(tasks, stage, begin, bar)
            streamed = time.perf_counter()
            for task in tasks:
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

    def _pass(self, tasks: list[Task], stage: int, begin: int, bar: tuple[Progress, TaskID]) -> int:
        """One stage's pass over the text from window `begin`; returns the windows it took."""
        sources = frozenset[Source]().union(*(task.sources for task in tasks))
        started = time.perf_counter()
        for count, start in enumerate(range(begin, len(self.tokens), self.batch)):
            if count and self.checkpoint is not None and count % self.checkpoint_every == 0:
                self._save(tasks, stage, start)
            ids = self.tokens[start : start + self.batch]
            activations = self._activations(sources, ids)
            for task in tasks:
                task.add(activations)
            del activations
            done = start + len(ids) - begin
            rate = done * self.tokens.shape[1] / (time.perf_counter() - started)
            bar[0].update(bar[1], advance=len(ids), rate=f"{rate:,.0f} tokens/s")
        return len(self.tokens) - begin

    def _activations(self, sources: frozenset[Source], ids: Tensor) -> Activations:
        captured = capture(self.model, self.shape, sources, ids)
        skip = self.plan.anchors
        return {source: exact_dtype(x[:, skip:]) for source, x in captured.items()}

    def _save(self, tasks: list[Task], stage: int, next_window: int) -> None:
        assert self.checkpoint is not None
        state = {
            "stage": stage,
            "next_window": next_window,
            "methods": self.methods.state_dict(),
            "tasks": [task.state_dict() for task in tasks],
        }
        save_checkpoint(self.checkpoint, self.digest, state)


def _check_arguments(
    tokens: Tensor, held_out: Tensor | None, shape: Anatomy, ridge: float, batch: int | None
) -> None:
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


def _check_enough(tokens: Tensor, anchors: int, tasks: list[Task]) -> None:
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise CorpusError(
            "a fit needs token windows of shape (windows, seq) with at least one token; got "
            f"{tuple(tokens.shape)}; give it a longer text"
        )
    rows = tokens.shape[0] * max(0, tokens.shape[1] - anchors)
    needed = max(task.unknowns for task in tasks)
    if rows < needed:
        raise CorpusError(
            f"a fit of {needed} unknowns per output needs at least as many tokens beyond the "
            f"{anchors} anchors of each window; got {rows} in {tokens.shape[0]} windows of "
            f"{tokens.shape[1]}; give it a longer text"
        )


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode comes back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _bar(shown: bool) -> Iterator[tuple[Progress, TaskID]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("windows"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        yield progress, progress.add_task("fit", total=None, rate="", visible=False)
