"""The stages that a recipe may name. A new one is a line in `STAGES`.

Every stage's function has one signature and changes the add-on's weights in place:

    run(model, addon, mixture, held_out, settings, *,
        checkpoint, checkpoint_every, log, progress, workers)

It returns what the report says of it, as plain data. workers (`kvfold.fitting.workers`) are the
processes that make the same call with the same arguments: they share the work and all end with the
same weights; only the first logs, shows bars and writes the checkpoint, which all go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvfold.anatomy import Anatomy
from kvfold.fitting.closed_form import ClosedFormSettings, closed_form_stage
from kvfold.fitting.descent import Descent
from kvfold.fitting.distil import distil, require_groups
from kvfold.fitting.distil_settings import DistilSettings
from kvfold.fitting.gates import GateSettings
from kvfold.fitting.gates_stage import require_gates, train_gates_stage
from kvfold.fitting.refine import RefineSettings, refine
from kvfold.plan import Plan


def _any_plan(plan: Plan, shape: Anatomy, settings: Any) -> None:
    """Every plan will do."""


def _distillable(plan: Plan, _: Anatomy, settings: DistilSettings) -> None:
    require_groups(plan, settings)


def _no_windows(_: Any) -> tuple[int, ...]:
    """The stage has the plan's own window alone."""
    return ()


def _windows(settings: Descent | DistilSettings) -> tuple[int, ...]:
    return settings.windows


class StageKind(NamedTuple):
    """What a stage is made of.

    settings: a frozen dataclass whose fields are the stage's keys in a recipe. run: as above.
    require: raises a `KvfoldError` if the stage has nothing to do on a plan, before any work.
    windows: sizes that its steps take beside the plan's own, of its settings.
    """

    settings: type[Any]
    run: Callable[..., dict[str, Any]]
    require: Callable[[Plan, Anatomy, Any], None] = _any_plan
    windows: Callable[[Any], tuple[int, ...]] = _no_windows


STAGES: Mapping[str, StageKind] = MappingProxyType(
    {
        "closed-form": StageKind(ClosedFormSettings, closed_form_stage),
        "gates": StageKind(GateSettings, train_gates_stage, require_gates, _windows),
        "refine": StageKind(RefineSettings, refine, windows=_windows),
        "distil": StageKind(DistilSettings, distil, _distillable, _windows),
    }
)
"""By the name in recipes."""
