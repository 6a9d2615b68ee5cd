"""What of each stage a dry run runs, and how often the stage itself would.

A stage's own code runs on tensors without data: its first batch or step, which makes what is kept
from then on, and one more, which stands for all the others. So memory and operations are those of
the code as it is, and a stage that changes changes its prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich.progress import Progress, TaskID
from torch import Tensor, nn

from kvfold.anatomy import anatomy
from kvfold.fitting.bar import progress_bar
from kvfold.fitting.checkpoint import Checkpoint
from kvfold.fitting.closed_form import ClosedForm, ClosedFormSettings
from kvfold.fitting.components_of_memory import GRADIENTS
from kvfold.fitting.distil import Distiller
from kvfold.fitting.distil_settings import DistilSettings
from kvfold.fitting.frozen import frozen
from kvfold.fitting.gates import GateSettings, GateTrainer, train_gates
from kvfold.fitting.live_memory import LiveMemory
from kvfold.fitting.mixture import Mixture, MixturePart
from kvfold.fitting.parts import units
from kvfold.fitting.refine import Refinement, RefineSettings
from kvfold.fitting.tasks import Task
from kvfold.fitting.wide import wide
from kvfold.methods import Source
from kvfold.runtime.student import Student
from kvfold.store.addon import AddOn

WINDOWS = 64
"""Windows of a mixture without data: more than any one batch takes."""


class DryText(NamedTuple):
    """The shape of a recipe's text.

    seq: tokens of a row. held_out: rows to measure on. rows: to train on, None if not known before
    the text is read.
    """

    seq: int
    held_out: int
    rows: int | None

    def mixture(self) -> Mixture:
        """Rows of this length, without data."""
        windows = torch.empty(WINDOWS, self.seq, dtype=torch.int64, device="meta")
        return Mixture([MixturePart("text", windows, 1.0)], 0)

    def tokens(self, rows: int) -> Tensor:
        """Ids of some rows, (rows, seq), without data."""
        return torch.empty(rows, self.seq, dtype=torch.int64, device="meta")


DryStage = Callable[[Any, AddOn, DryText, Any, LiveMemory], bool]
"""Runs a stage in a dry world, counted by the meter; returns whether its length is known."""


class _DryClosedForm(ClosedForm):
    """Takes two batches of each pass, the second for all others."""

    meter: LiveMemory
    batches: int

    def _pass(
        self, tasks: list[Task], stage: int, begin: int, bar: tuple[Progress, TaskID]
    ) -> None:
        sources = frozenset[Source]().union(*(task.sources for task in tasks))
        self.take(tasks, sources, 0)
        if self.batches > 1:
            with self.meter.repeated(self.batches - 1):
                self.take(tasks, sources, 0)


def dry_closed_form(
    model: Any, addon: AddOn, text: DryText, settings: ClosedFormSettings, meter: LiveMemory
) -> bool:
    """The closed form: passes over the text, and the solution after each."""
    most = None if settings.tokens is None else max(1, settings.tokens // text.seq)
    rows = min((n for n in (most, text.rows) if n is not None), default=None)
    known = rows is not None
    # Enough text for any map, and none in memory, where it is not known how much there is.
    tokens = text.tokens(1).expand(2**20, -1) if rows is None else text.tokens(rows)
    solver = _DryClosedForm(model, addon, tokens, settings, Checkpoint(None, "", 1))
    solver.meter = meter
    solver.batches = math.ceil(len(tokens) / solver.batch) if known else 2
    with wide(addon, model), frozen(model), progress_bar(False) as bar:
        solver.run(bar)
    return known


def dry_gates(
    model: Any, addon: AddOn, text: DryText, settings: GateSettings, meter: LiveMemory
) -> bool:
    """Gates: the steps on two rows, the second for all others."""
    mixture, shape = text.mixture(), anatomy(model)
    turns = _turns(settings.steps, settings.moves)
    few = replace(settings, steps=sum(moves for _, moves in turns))

    def row(number: int) -> Tensor:
        meter.times = turns[number][0]
        return mixture.batch(number, 1)

    with wide(addon, model), frozen(model):
        trainer = GateTrainer(model, shape, addon.plan, addon.pipelines, text.seq, few)
        groups = trainer.descent.optimizer.param_groups
        _name_gradients([weight for group in groups for weight in group["params"]], meter)
        train_gates(model, shape, [trainer], row)
    meter.times = 1.0
    return True


class _DryRefinement(Refinement):
    """Takes the steps of one batch at a time."""

    def dry(self, meter: LiveMemory) -> None:
        """Every step and look."""
        settings = self.settings
        _name_gradients([w for unit in self.units for w in unit.weights.values()], meter)
        self._begin(None)
        for times, moves in _turns(settings.steps, settings.moves):
            with meter.repeated(times):
                exact = self._captured(self._rows(0))
                for _ in range(moves):
                    self.descent.step(exact, {}, self._training())
        with meter.repeated(math.ceil(settings.steps / settings.look_every)):
            self._look(None)


def dry_refine(
    model: Any, addon: AddOn, text: DryText, settings: RefineSettings, meter: LiveMemory
) -> bool:
    """Refine: the looks at held-out rows, and the steps on one batch for all batches."""
    trained = units(list(addon.pipelines), settings.parts)  # type: ignore[arg-type]
    if not trained or settings.steps == 0:
        return True
    held_out = text.tokens(text.held_out)
    with wide(addon, model), frozen(model):
        saves = Checkpoint(None, "", 1)
        run = _DryRefinement(model, addon, text.mixture(), held_out, settings, trained, saves)
        run.dry(meter)
    return True


class _DryDistiller(Distiller):
    """Takes one forward of the first step, and two of the one that stands for all others."""

    def dry(self, meter: LiveMemory) -> None:
        """Every step and look."""
        settings, held_out = self.settings, self.held_out
        at_once = settings.rows_at_once or settings.rows
        forwards = math.ceil(settings.rows / at_once)
        looks = 1 + math.ceil(settings.steps / settings.look_every)
        self.held_out = held_out[:at_once]
        self.windows = (max(self.windows),)  # of what steps draw from, that which takes most
        self.students = sorted(self.students, key=_group)[:1]
        _name_gradients(self.weights, meter)
        with meter.repeated(looks * math.ceil(len(held_out) / at_once)):
            self._look(None)
        for turn, (times, _) in enumerate(_turns(settings.steps, 1)):
            few = min(forwards, 1 + turn)
            self.settings = replace(settings, rows=min(settings.rows, few * at_once))
            with meter.repeated(times * forwards / few):
                self._learn()
            with meter.repeated(times):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        with self.best_kept():
            pass


def dry_distil(
    model: Any, addon: AddOn, text: DryText, settings: DistilSettings, meter: LiveMemory
) -> bool:
    """Distil: looks at held-out rows, and two steps, the second for all others."""
    with frozen(model), wide(addon, model):
        held_out = text.tokens(text.held_out)
        run = _DryDistiller(model, addon, text.mixture(), held_out, settings)
        run.dry(meter)
    return True


def _group(student: Student) -> int:
    """Tokens of the smallest slots: the fewer, the more slots there are."""
    return min((pipeline.group for pipeline in student.pipelines), default=1)


def _turns(steps: int, moves: int) -> list[tuple[float, int]]:
    """How often each of two turns comes that stand for all, and the steps in it.

    moves: steps of a turn.
    """
    moves = min(steps, moves)
    if moves == 0:
        return []
    others = steps / moves - 1
    return [(1, moves), (others, moves)] if others > 0 else [(1, moves)]


def _name_gradients(weights: list[nn.Parameter], meter: LiveMemory) -> None:
    def named(weight: Tensor) -> None:
        if weight.grad is not None:
            meter.rename(weight.grad, GRADIENTS)

    for weight in weights:
        weight.register_post_accumulate_grad_hook(named)  # type: ignore[no-untyped-call]
