"""What is measured: fitted weights under a plan that may differ from the one they were saved with.

Anchors, window, prefill attention and residency are choices of the day of use. One fit can be
measured under many of them, and the yardstick with no history at all is one more such plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from kvfold.methods import Lora, StateProjector
from kvfold.plan import Plan
from kvfold.runtime.attach import AddOnLike


@dataclass
class Candidate:
    """Pipelines under a plan; the base model is checked by the add-on that they come from."""

    plan: Plan
    pipelines: nn.ModuleList
    state_projector: StateProjector | None
    lora: Lora | None
    origin: AddOnLike

    def check_base(self, model: Any) -> None:
        """Raise `AddOnError` if the model is not the one that the origin was fitted on."""
        self.origin.check_base(model)


def never_folds(addon: AddOnLike, tokens: int) -> bool:
    """Whether a text of so many tokens fits in anchors and window, so that nothing is folded."""
    return tokens <= addon.plan.anchors + addon.plan.window


def skipped_tokens(plan: Plan, tokens: int) -> int:
    """How many of a prompt's tokens run through the layers below the split only.

    The last `replay` and the anchors run through all; 0 for a prompt that has no others.
    """
    if plan.prefill != "skip":
        return 0
    return max(0, tokens - plan.replay - plan.anchors)


def with_plan(addon: AddOnLike, **changes: Any) -> AddOnLike:
    """The same weights with some keys of the plan changed (anchors, window, resident, ...).

    Keys given as None stay as they are. Raises `PlanError` for a value that can't be.
    """
    chosen = {key: value for key, value in changes.items() if value is not None}
    if not chosen:
        return addon
    plan = addon.plan.replace(**chosen)
    return Candidate(plan, addon.pipelines, addon.state_projector, addon.lora, addon)
