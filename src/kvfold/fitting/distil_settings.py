"""How an add-on is distilled: what a recipe may say of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvfold.errors import FitError
from kvfold.fitting.distil_loss import LossSettings
from kvfold.fitting.draws import check_draws
from kvfold.fitting.parts import PARTS, Part, check_parts


@dataclass(frozen=True)
class DistilSettings(LossSettings):
    """How an add-on is distilled; temperature, hidden_weight and reverse are of the loss.

    steps: of the optimiser. rows: of text in a step; rows_at_once: of them in one forward, whose
    gradients are added up (0: all). learning_rate: at its highest, warmed up over the first
    `warmup` share of the steps and then lowered along a cosine; in units of how far a step moves
    each output of a map (see `kvfold.fitting.weight_scales`). windows: window sizes that steps
    draw from, beside the plan's own, so that one add-on serves several budgets; a size that comes
    twice is drawn twice as often. groups: tokens of a pooled slot that steps draw from, beside the
    plan's own, none larger. parts: what is
    trained, of `kvfold.fitting.parts`; low-rank terms always are. look_every: steps between two
    looks at the held-out rows. patience: looks without a better one after which it ends (0: goes
    on to the last step). checkpoint_layers: keep less for the backward pass and compute more.
    seed: of all draws. Raises `FitError` for values that make no sense.
    """

    steps: int = 300
    rows: int = 2
    rows_at_once: int = 0
    learning_rate: float = 0.01
    warmup: float = 0.05
    windows: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    parts: tuple[Part, ...] = PARTS
    look_every: int = 20
    patience: int = 0
    checkpoint_layers: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"steps": 1, "rows": 1, "rows_at_once": 0, "look_every": 1, "patience": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise FitError(
                    f"{name} of distilling must be at least {smallest}; got {getattr(self, name)}"
                )
        check_draws(self.learning_rate, self.windows, self.seed)
        if not 0 <= self.warmup <= 1:
            raise FitError(f"warmup must be a share from 0 to 1; got {self.warmup}")
        check_parts(self.parts)

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        warm = min(1.0, (step + 1) / max(1.0, self.warmup * self.steps))
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    @property
    def loss(self) -> LossSettings:
        """What the loss depends on."""
        return LossSettings(**{f.name: getattr(self, f.name) for f in fields(LossSettings)})
