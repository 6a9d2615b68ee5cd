"""Maps and codes in closed form: one pass over the text for each stage of the methods' problems.

Every batch runs through the frozen model once, up to the last activation that is needed, and
goes into sums whose size does not depend on the text; then the weights follow by linear algebra.
Nothing is written to disk but a checkpoint, if one is asked for.

Positions below the plan's anchors are left out of the sums: they are kept exact and never read
from a code, and a first token's keys and values (an attention sink) are far from all others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID
from torch import Tensor

from kvfold.anatomy import Anatomy, anatomy, text_decoder
from kvfold.errors import CorpusError, FitError
from kvfold.fitting.bar import progress_bar
from kvfold.fitting.checkpoint import Checkpoint, job_digest
from kvfold.fitting.decay import set_kept
from kvfold.fitting.dispersion import DEFAULT_STRENGTH
from kvfold.fitting.frozen import frozen
from kvfold.fitting.gram import exact_dtype
from kvfold.fitting.inputs import check_text
from kvfold.fitting.json_lines import Log
from kvfold.fitting.mixture import Mixture
from kvfold.fitting.ridge import DEFAULT_RIDGE
from kvfold.fitting.tasks import HasProblems, Task, stages, tasks_of_stage
from kvfold.fitting.wide import wide
from kvfold.fitting.workers import ALONE, Workers
from kvfold.methods import Activations, Source, depth_methods
from kvfold.runtime.capture import capture
from kvfold.runtime.sharding import is_sharded
from kvfold.store.addon import AddOn

TOKENS_PER_BATCH = 1024
"""Enough rows for matrix products to run at full speed on a CPU, few enough to stay small."""


@dataclass(frozen=True)
class ClosedFormSettings:
    """How maps and codes are solved for.

    ridge: see `kvfold.fitting.ridge`. key_dispersion: see `kvfold.fitting.dispersion`; 0 for plain
    least squares. tokens: of the mixture, at most, rounded down to whole rows; as many rows as all
    its parts have if None.
    """

    ridge: float = DEFAULT_RIDGE
    key_dispersion: float = DEFAULT_STRENGTH
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("ridge", "key_dispersion"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise FitError(f"{name} must be at least 0 and finite; got {value}")
        if self.tokens is not None and self.tokens < 1:
            raise FitError(f"the closed form's tokens must be at least 1; got {self.tokens}")


def closed_form_stage(
    model: Any,
    addon: AddOn,
    mixture: Mixture,
    held_out: Tensor,
    settings: ClosedFormSettings,
    *,
    checkpoint: Path | None = None,
    checkpoint_every: int = 16,
    log: Log | None = None,
    progress: bool = True,
    workers: Workers = ALONE,
) -> dict[str, Any]:
    """Solve for every map and code of an add-on, in place; returns what the report says of it.

    mixture: parts give rows by their weights. held_out: not used, as nothing is chosen here.
    checkpoint: a file to go on from and to write every `checkpoint_every` batches; it is deleted
    at the end. log: called with one line in the end. workers: see `ClosedForm`. Raises
    `CorpusError` for too little text, `FitError` for non-finite activations, degenerate features,
    a foreign checkpoint or a lost worker.
    """
    check_text(model, mixture, held_out)
    rows = sum(len(part.windows) for part in mixture.parts)
    if settings.tokens is not None:
        rows = max(1, min(rows, settings.tokens // mixture.seq))
    tokens = mixture.batch(0, rows)
    job = job_digest(
        addon.plan.to_json(), addon.base.to_json(), repr(settings), mixture.digest(), tokens=tokens
    )
    saves = Checkpoint(checkpoint, job, checkpoint_every, workers)
    solver = ClosedForm(model, addon, tokens, settings, saves, workers=workers)
    with wide(addon, model), frozen(model), progress_bar(progress and workers.first) as bar:
        report = solver.run(bar)
    solver.checkpoint.remove()
    if log is not None and workers.first:
        log(report["fit"])
    return report


class ClosedForm:
    """The closed form of one add-on, whose weights must be in `wide_dtype`.

    tokens: (windows, seq) ids without padding. batch: windows in one forward. workers: the
    processes that do this same work, each with the whole text, of which it takes its share; all
    get the same weights. Raises `CorpusError` for fewer windows than workers.
    """

    def __init__(
        self,
        model: Any,
        addon: AddOn,
        tokens: Tensor,
        settings: ClosedFormSettings,
        checkpoint: Checkpoint,
        batch: int | None = None,
        workers: Workers = ALONE,
    ) -> None:
        self.model, self.addon, self.tokens = model, addon, tokens
        self.workers = workers
        if tokens.ndim and 0 < len(tokens) < workers.count:
            raise CorpusError(
                f"every worker must have text; got {len(tokens)} windows for {workers.count} "
                "workers; give a longer text or start fewer"
            )
        self.shape: Anatomy = anatomy(model)
        self.settings, self.checkpoint = settings, checkpoint
        self.batch = batch or default_batch(tokens)
        self.streaming = self.solving = 0.0
        self.windows = 0

    def run(self, bar: tuple[Progress, TaskID]) -> dict[str, Any]:
        """All passes; returns `fit`, and `state_projector` where there is one, for the report."""
        device = next(text_decoder(self.model).parameters()).device
        projector = self.addon.state_projector
        members: list[HasProblems] = list(depth_methods(self.addon.pipelines))
        members += [] if projector is None else [projector]
        order = stages(members)
        saved = self.checkpoint.load()
        if saved is not None:
            self._load(saved)
        for number, stage in enumerate(order):
            if saved is not None and stage < saved["stage"]:
                continue
            tasks = tasks_of_stage(members, stage, self.shape, device, self.workers)
            check_enough(self.tokens, self.addon.plan.anchors, tasks)
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
            self._pass(tasks, stage, begin, bar)
            started = time.perf_counter()
            for task in tasks:
                task.add_up(self.workers)
                task.solve(self.settings.ridge, self.settings.key_dispersion)
            self._share_weights()
            self.solving += time.perf_counter() - started
        seen = self.windows * self.tokens.shape[1] if self.windows else 0
        report = {
            "tokens": self.tokens.numel(),
            "passes": len(order),
            "ridge": self.settings.ridge,
            "key_dispersion": self.settings.key_dispersion,
            "seconds": round(self.streaming, 3),
            "tokens_per_second": round(seen / self.streaming, 1) if seen else None,
            "solve_seconds": round(self.solving, 3),
        }
        kept = set_kept(self.model, self.addon.plan, projector, self.tokens)
        self._share_weights()
        return {"fit": report, **kept}

    def state(self, stage: int, next_window: int = 0, tasks: Sequence[Task] = ()) -> dict[str, Any]:
        """What a checkpoint must hold to go on at a window of a stage, all earlier ones solved."""
        projector = self.addon.state_projector
        return {
            "stage": stage,
            "next_window": next_window,
            "pipelines": self.addon.pipelines.state_dict(),
            "projector": {} if projector is None else projector.state_dict(),
            "tasks": [task.state_dict() for task in tasks],
            "spent": [self.streaming, self.solving, self.windows],
        }

    def _pass(
        self, tasks: list[Task], stage: int, begin: int, bar: tuple[Progress, TaskID]
    ) -> None:
        """One stage's pass over the text from window `begin`.

        In each round every worker takes in `batch` windows.
        """
        sources = frozenset[Source]().union(*(task.sources for task in tasks))
        began = time.perf_counter()
        each = self.batch * self.workers.count
        for count, start in enumerate(range(begin, len(self.tokens), each)):
            if self.checkpoint.due(count):
                self._save(stage, start, tasks)
            started = time.perf_counter()
            rows = self.take(tasks, sources, start)
            ended = time.perf_counter()
            self.streaming += ended - started
            self.windows += rows
            rate = (start + rows - begin) * self.tokens.shape[1] / (ended - began)
            bar[0].update(bar[1], advance=rows, rate=f"{rate:,.0f} tokens/s")

    def take(self, tasks: list[Task], sources: frozenset[Source], start: int) -> int:
        """Add this worker's share of the round that begins at a window to the sums.

        Returns the round's windows.
        """
        taken = self.tokens[start : start + self.batch * self.workers.count]
        ids = self.workers.share(taken)
        if len(ids):
            activations = self._activations(sources, ids)
            for task in tasks:
                task.add(activations)
        elif is_sharded(self.model):  # the others need this worker's part of the weights
            self._activations(sources, taken[:1])
        return len(taken)

    def _activations(self, sources: frozenset[Source], ids: Tensor) -> Activations:
        captured = capture(self.model, self.shape, sources, ids)
        skip = self.addon.plan.anchors
        return {source: exact_dtype(x[:, skip:]) for source, x in captured.items()}

    def _save(self, stage: int, next_window: int, tasks: list[Task]) -> None:
        """Write where the fit stands; sums of all workers are then the first one's alone."""
        for task in tasks:
            task.add_up(self.workers)
            if not self.workers.first:
                task.clear()
        self.checkpoint.save(self.state(stage, next_window, tasks))

    def _share_weights(self) -> None:
        """Linear algebra may differ by a bit between machines: all take the first one's weights."""
        projector = self.addon.state_projector
        for module in (self.addon.pipelines, *([] if projector is None else [projector])):
            self.workers.same_weights(module.state_dict().values())

    def _load(self, saved: dict[str, Any]) -> None:
        self.streaming, self.solving, windows = saved["spent"]
        self.windows = int(windows)
        self.addon.pipelines.load_state_dict(saved["pipelines"])
        if self.addon.state_projector is not None:
            self.addon.state_projector.load_state_dict(saved["projector"])


def default_batch(tokens: Tensor) -> int:
    """Windows in one forward, for a text of (windows, seq)."""
    return max(1, TOKENS_PER_BATCH // max(1, tokens.shape[-1] if tokens.ndim else 1))


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
