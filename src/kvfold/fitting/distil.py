"""Distillation: an add-on's weights trained end to end, so that the folded model says what the
plain one says.

Teacher and student are one frozen model. A step runs the plain model on some rows, then the same
model with its history folded (`kvfold.runtime.student`), and moves the add-on's weights down the
distance of their predictions (`kvfold.fitting.distil_loss`). At every look the distance is
measured on held-out rows; the weights of the best look are what is kept, so the start is never
made worse on them.

Which rows and which window a step takes follows from its number alone. So a run that is resumed
goes on exactly where it was. Several workers share the rows of each step and of each look, and do
together what one process does that takes as many rows at once.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.anatomy import anatomy
from kvfold.errors import CorpusError, DivergedError, FitError
from kvfold.fitting.bar import progress_bar
from kvfold.fitting.checkpoint import Checkpoint, job_digest
from kvfold.fitting.descent import remedy_of
from kvfold.fitting.distil_loss import Distance, distance, distance_and_gradient
from kvfold.fitting.distil_settings import DistilSettings
from kvfold.fitting.frozen import frozen
from kvfold.fitting.gram import exact_dtype
from kvfold.fitting.inputs import check_text
from kvfold.fitting.json_lines import Log
from kvfold.fitting.mixture import Mixture
from kvfold.fitting.row_lengths import check_plan_window, check_windows
from kvfold.fitting.scaled_adam import ScaledAdam
from kvfold.fitting.seeds import derived_seed
from kvfold.fitting.shared_steps import (
    average_gradients,
    require_even,
    require_even_looks,
    start_alike,
    summed,
)
from kvfold.fitting.weight_scales import start_weights, weight_groups
from kvfold.fitting.wide import wide
from kvfold.fitting.workers import ALONE, Workers
from kvfold.methods import Activations, rebuilt_pipelines
from kvfold.plan import Plan
from kvfold.plan_overrides import regrouped
from kvfold.runtime.adapters import adapted
from kvfold.runtime.capture import capture, plain_pass
from kvfold.runtime.student import Student
from kvfold.store.addon import AddOn

LORA_SHARE = 0.02
"""Low-rank terms start at nothing and add up to much: their rate beside that of fitted maps."""


def distil(
    model: Any,
    addon: AddOn,
    mixture: Mixture,
    held_out: Tensor,
    settings: DistilSettings | None = None,
    *,
    checkpoint: Path | None = None,
    checkpoint_every: int = 16,
    log: Log | None = None,
    progress: bool = True,
    workers: Workers = ALONE,
) -> dict[str, Any]:
    """Train an add-on end to end against its own base model; its weights change in place.

    model: plain; left as it was. mixture: what is trained on. held_out: (windows, seq) ids to look
    at. checkpoint: a file to go on from, written every `checkpoint_every` steps and deleted at the
    end. log: called with plain data at every step and every look. workers: those that make this
    same call; they share the rows, all end with the same weights, and only the first logs and
    writes. Returns the report: steps, held-out KL at each look, the best one's step, tokens and
    seconds.

    Raises `AddOnError` for another base model, `CorpusError` for rows too short to have a history,
    `FitError` where nothing can be trained, a loss is not finite, rows can't be shared out evenly,
    a worker is lost, or the checkpoint is another job's.
    """
    settings = settings or DistilSettings()
    addon.check_base(model)
    check_text(model, mixture, held_out)
    with frozen(model), wide(addon, model):
        run = Distiller(model, addon, mixture, held_out, settings, workers)
        saves = Checkpoint(checkpoint, run.digest, checkpoint_every, workers)
        saved = saves.load()
        if saved is not None:
            run.load_state_dict(saved)
        with run.best_kept(), progress_bar(progress and workers.first, unit="steps") as bar:
            bar[0].update(bar[1], description="distil", total=settings.steps, visible=True, rate="")
            while not run.is_over:
                run.step(log if workers.first else None)
                bar[0].update(bar[1], completed=run.done, rate=f"held-out KL {run.best_kl:.4f}")
                if saves.due(run.done):
                    saves.save(run.state_dict())
        saves.remove()
        return run.report()


class Distiller:
    """One distillation, step by step. The add-on's weights must be in float32 or float64."""

    def __init__(
        self,
        model: Any,
        addon: AddOn,
        mixture: Mixture,
        held_out: Tensor,
        settings: DistilSettings,
        workers: Workers = ALONE,
    ) -> None:
        self.model, self.addon, self.mixture, self.settings = model, addon, mixture, settings
        self.held_out, self.workers = held_out, workers
        require_even(workers, settings.rows, "distilling")
        require_even_looks(workers, model, len(self._held_out_batches()))
        lora = addon.lora
        self.student = self._student(addon.plan)
        self.students = [self.student, *map(self._student, self._regrouped())]
        self.windows = (addon.plan.window, *settings.windows)
        self._check_text()
        groups = weight_groups(self.student.pipelines, settings.parts)
        if lora is not None:
            groups.append({"params": list(lora.parameters()), "name": "lora", "share": LORA_SHARE})
        if not groups:
            raise FitError(
                f"there must be something to distil; the add-on has no weights in the parts "
                f"{', '.join(settings.parts)} and no low-rank terms; name other parts"
            )
        self.weights: list[nn.Parameter] = [w for group in groups for w in group["params"]]
        for weight in self.weights:
            weight.requires_grad_(True)
        self.digest = self._digest()
        self._start(groups)
        self.optimizer = ScaledAdam(groups, lr=settings.learning_rate)
        start_alike(workers, self.optimizer)
        self.done = 0
        self.seconds = 0.0
        self.looks: list[tuple[int, float, float]] = []
        self.best = [weight.detach().clone() for weight in self.weights]

    def _student(self, plan: Plan) -> Student:
        """The folded model under a plan of the add-on's own weights."""
        shape, lora = anatomy(self.model), self.addon.lora
        return Student(
            self.model,
            shape,
            plan,
            rebuilt_pipelines(plan, shape, self.addon.pipelines),
            below=None if lora is None else min(layer for layer, _ in lora.adapted),
            checkpoint_layers=self.settings.checkpoint_layers,
        )

    def _regrouped(self) -> list[Plan]:
        require_groups(self.addon.plan, self.settings)
        return [regrouped(self.addon.plan, group) for group in self.settings.groups]

    def _check_text(self) -> None:
        if self.held_out.ndim != 2 or len(self.held_out) == 0:
            raise CorpusError(
                "distilling needs held-out rows (windows, seq), at least one; got "
                f"{tuple(self.held_out.shape)}; the best weights are chosen on them"
            )
        check_windows(self.addon.plan, self.windows, self.mixture.seq, "distilling")
        check_plan_window(self.addon.plan, self.held_out.shape[1])

    def _digest(self) -> str:
        weights = hashlib.sha256()
        for weight in self.weights:
            weights.update(weight.detach().cpu().contiguous().numpy().tobytes())
        return job_digest(
            self.addon.plan.to_json(),
            self.addon.base.to_json(),
            repr(self.settings),
            self.mixture.digest(),
            weights.hexdigest(),
            tokens=self.held_out,
        )

    def _start(self, groups: list[dict[str, Any]]) -> None:
        """Measure how far a step may move each weight, on the first rows."""
        sources = frozenset(s for p in self.student.pipelines for s in p.inputs)
        ids = self.mixture.batch(0, self.settings.rows)
        batches = []
        for part in torch.split(ids, self.settings.rows_at_once or len(ids)):
            captured = capture(self.model, self.student.shape, sources, part)
            batches.append({source: exact_dtype(x) for source, x in captured.items()})
        start_weights(
            self.student.pipelines, groups, batches, self.addon.plan.anchors, self.settings.seed
        )

    @property
    def best_kl(self) -> float:
        """The lowest held-out KL so far; not a number before the first look."""
        return min((kl for _, kl, _ in self.looks), default=math.nan)

    @property
    def best_step(self) -> int:
        """How many steps had been taken at the best look."""
        return min(self.looks, key=lambda look: (look[1], look[0]))[0]

    @property
    def is_over(self) -> bool:
        """Whether the last step is taken, or patience has run out."""
        if self.done >= self.settings.steps:
            return True
        if not self.settings.patience or not self.looks:
            return False
        best = self.best_step
        return sum(step > best for step, _, _ in self.looks) >= self.settings.patience

    def step(self, log: Log | None = None) -> None:
        """Move the weights once; looks come first of all, and after every `look_every` steps."""
        started = time.perf_counter()
        if not self.looks:
            self._look(log)
        moved = self._learn()
        rate = self.settings.rate(self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self._tell(log, {"step": self.done, "loss": moved.loss, "kl": moved.kl, "rate": rate})
        if self.done % self.settings.look_every == 0 or self.done == self.settings.steps:
            self._look(log)
        self.seconds += time.perf_counter() - started

    def _drawn(self, name: str, count: int) -> int:
        """Which of `count` choices this step takes."""
        return derived_seed(self.settings.seed, name, self.done) % count

    def _learn(self) -> Distance:
        """Gradients of one step, of all workers' rows; returns the distance before it."""
        rows = self.workers.share(self.mixture.batch(self.done, self.settings.rows))
        window = self.windows[self._drawn("window", len(self.windows))]
        student = self.students[self._drawn("group", len(self.students))]
        parts = []
        seed = derived_seed(self.settings.seed, "positions", self.done)
        for ids in torch.split(rows, self.settings.rows_at_once or len(rows)):
            found, teacher = self._teach(ids)
            with adapted(self.model, self.addon.lora), student.running():
                with torch.enable_grad():
                    hidden = student(found, window=window)
                moved, gradient = distance_and_gradient(
                    self.model, hidden, teacher, self.settings.loss, seed=seed
                )
                hidden.backward(gradient * (len(ids) / len(rows)))  # type: ignore[no-untyped-call]
            parts.append((len(ids), moved))
        mean = _mean(parts, self.workers)
        if not math.isfinite(mean.loss):
            raise DivergedError(
                f"the loss must be finite; at step {self.done + 1} it is {mean.loss}; "
                f"{self._remedy()}"
            )
        average_gradients(self.workers, self.weights)
        return mean

    def _teach(self, ids: Tensor) -> tuple[Activations, Tensor]:
        """What the student is handed, and the final hidden states that it should come to.

        Codes that are made of a pass of their own are served from one with low-rank terms on.
        """
        student = self.student
        found, teacher = plain_pass(self.model, student.shape, student.sources, ids)
        if self.addon.lora is not None and student.lags:
            with adapted(self.model, self.addon.lora):
                found = capture(self.model, student.shape, student.sources, ids)
        return found, teacher

    def _held_out_batches(self) -> Sequence[Tensor]:
        at_once = self.settings.rows_at_once or self.settings.rows // self.workers.count
        return torch.split(self.held_out, at_once)

    @torch.no_grad()
    def _look(self, log: Log | None) -> None:
        """Measure the held-out rows, and keep the weights if they are the best so far."""
        parts = []
        for ids in self._held_out_batches()[self.workers.rank :: self.workers.count]:
            found, teacher = self._teach(ids)
            with adapted(self.model, self.addon.lora), self.student.running():
                hidden = self.student(found)
            parts.append((len(ids), distance(self.model, hidden, teacher, self.settings.loss)))
        seen = _mean(parts, self.workers)
        if not math.isfinite(seen.kl):
            raise DivergedError(
                f"the held-out KL must be finite; after {self.done} steps it is {seen.kl}; "
                f"{self._remedy()}"
            )
        if not self.looks or seen.kl < self.best_kl:
            self.best = [weight.detach().clone() for weight in self.weights]
        self.looks.append((self.done, seen.kl, seen.hidden))
        self._tell(log, {"step": self.done, "held_out_kl": seen.kl, "held_out_hidden": seen.hidden})

    def _remedy(self) -> str:
        return remedy_of(self.done, self.settings.learning_rate)

    @staticmethod
    def _tell(log: Log | None, line: dict[str, Any]) -> None:
        if log is not None:
            log({"stage": "distil", **line})

    @contextmanager
    def best_kept(self) -> Iterator[None]:
        """Leave the weights of the best look in place at the end, also of an interrupted run."""
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, best in zip(self.weights, self.best, strict=True):
                    weight.copy_(best)
                    weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """All that another run of the same job needs to go on."""
        return {
            "done": self.done,
            "seconds": self.seconds,
            "looks": self.looks,
            "weights": [weight.detach() for weight in self.weights],
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where another run of the same job was."""
        self.done, self.seconds = int(saved["done"]), float(saved["seconds"])
        self.looks = [(int(step), float(kl), float(error)) for step, kl, error in saved["looks"]]
        for kept, theirs in ((self.weights, saved["weights"]), (self.best, saved["best"])):
            for tensor, stored in zip(kept, theirs, strict=True):
                tensor.copy_(stored)
        self.optimizer.load_state_dict(saved["optimizer"])

    def report(self) -> dict[str, Any]:
        """What was done and what it brought, as plain data."""
        seq = self.mixture.seq
        tokens = self.done * self.settings.rows * seq
        return {
            "steps": self.done,
            "best_step": self.best_step,
            "rows": self.settings.rows,
            "seq": seq,
            "tokens": tokens,
            "windows": list(self.windows),
            "groups": list(self.settings.groups),
            "learning_rate": self.settings.learning_rate,
            "trained_values": sum(weight.numel() for weight in self.weights),
            "held_out_kl": {"start": round(self.looks[0][1], 6), "best": round(self.best_kl, 6)},
            "looks": [[step, round(kl, 6), round(error, 6)] for step, kl, error in self.looks],
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(tokens / self.seconds, 1) if self.seconds else None,
        }


def require_groups(plan: Plan, settings: DistilSettings) -> None:
    """Raise `FitError` for groups that steps can't draw under a plan."""
    own = max((entry.group for entry in plan.sequence), default=0)
    if any(not 2 <= group <= own for group in settings.groups):
        raise FitError(
            "groups of distilling must be from 2 to the plan's own group of pooling, "
            f"{own or 'of which it has none'}; got {list(settings.groups)}"
        )


def _mean(parts: list[tuple[int, Distance]], workers: Workers) -> Distance:
    """The distance over rows of several batches, of all workers."""
    sums = [sum(n * getattr(d, f.name) for n, d in parts) for f in fields(Distance)]
    total, *sums = summed(workers, [sum(rows for rows, _ in parts), *sums])
    return Distance(*(one / total for one in sums))
