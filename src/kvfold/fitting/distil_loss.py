"""How far a student's predictions are from its teacher's, and which way it should move.

`loss = T^2 KL(teacher_T || student_T) + weight * |h - h_t|^2 / |h_t|^2`, both means over tokens,
with distributions at temperature T and h the final hidden states. A share of the KL may be taken
the other way round (student || teacher), which seeks modes instead of covering them.

Logits cost more than the layers of a small model, so they are made for a few rows at a time: each
chunk's gradient in the hidden states is worked out and its logits are forgotten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import FitError
from kvfold.fitting.seeds import drawn_order
from kvfold.runtime.logits import logits

CHUNK_ROWS = 128
"""Positions whose logits exist at once."""


@dataclass(frozen=True)
class LossSettings:
    """What a student is held to.

    temperature: of the KL, above 0. hidden_weight: of the final hidden states' squared error,
    relative to their size; 0 leaves it out. reverse: the share of the KL that is taken from the
    student to the teacher, from 0 to 1. logits_share: the share of positions, drawn anew in each
    step, whose predictions a step compares: in a small model logits are half of its cost. Raises
    `FitError` for other values.
    """

    temperature: float = 2.0
    hidden_weight: float = 1.0
    reverse: float = 0.0
    logits_share: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise FitError(f"the temperature must be above 0; got {self.temperature}")
        if not (math.isfinite(self.hidden_weight) and self.hidden_weight >= 0):
            raise FitError(f"hidden_weight must be at least 0; got {self.hidden_weight}")
        if not 0 <= self.reverse <= 1:
            raise FitError(f"reverse must be a share from 0 to 1; got {self.reverse}")
        if not 0 < self.logits_share <= 1:
            raise FitError(f"logits_share must be above 0 and at most 1; got {self.logits_share}")


@dataclass(frozen=True)
class Distance:
    """Means over tokens.

    loss: what is minimised. kl: from teacher to student at temperature 1, in nats. hidden: squared
    error of the final hidden states, relative to their size.
    """

    loss: float
    kl: float
    hidden: float


def distance(
    model: Any, student: Tensor, teacher: Tensor, settings: LossSettings | None = None
) -> Distance:
    """How far two runs are apart. student, teacher: (batch, seq, hidden), final hidden states."""
    settings = settings or LossSettings()
    every = torch.arange(student[..., 0].numel())
    found, _ = _walk(model, student.detach(), teacher, settings, every, learn=False)
    return found


def distance_and_gradient(
    model: Any, student: Tensor, teacher: Tensor, settings: LossSettings, *, seed: int = 0
) -> tuple[Distance, Tensor]:
    """The same, and the gradient of `loss` in the student's hidden states, of their shape.

    seed: of the draw of positions whose predictions are compared; the KL is then their mean.
    """
    count = student[..., 0].numel()
    drawn = drawn_order(count, seed)[: max(1, round(settings.logits_share * count))].sort().values
    found, gradient = _walk(model, student.detach(), teacher, settings, drawn, learn=True)
    assert gradient is not None
    return found, gradient


def _walk(
    model: Any,
    student: Tensor,
    teacher: Tensor,
    settings: LossSettings,
    compared: Tensor,
    *,
    learn: bool,
) -> tuple[Distance, Tensor | None]:
    """compared: indices among all positions, in order, of those whose logits are made."""
    ours, theirs = student.flatten(0, -2), teacher.flatten(0, -2)
    error, gradient = _hidden_error(ours, theirs)
    gradient *= settings.hidden_weight
    softened = plain = 0.0
    for rows in torch.split(compared.to(ours.device), CHUNK_ROWS):
        hidden = ours[rows].requires_grad_(learn)
        with torch.set_grad_enabled(learn):
            kl, at_one = _divergence(model, hidden, theirs[rows], settings)
        if learn:
            gradient[rows] += torch.autograd.grad(kl, hidden)[0] / len(compared)
        softened += float(kl.detach()) / len(compared)
        plain += float(at_one) / len(compared)
    loss = softened + settings.hidden_weight * error
    return Distance(loss, plain, error), gradient.view_as(student) if learn else None


def _hidden_error(ours: Tensor, theirs: Tensor) -> tuple[float, Tensor]:
    """Squared error relative to the teacher's size, and its gradient in ours."""
    size = theirs.float().pow(2).sum().clamp_min(torch.finfo(torch.float32).tiny)
    difference = _wide(ours - theirs)
    return float(difference.pow(2).sum() / size), (2 * difference / size).to(ours.dtype)


def _divergence(
    model: Any, student: Tensor, teacher: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Sums over rows: the KL as it is minimised, and the forward KL at temperature 1."""
    with torch.no_grad():
        base = _wide(logits(model, teacher))
    ours = _wide(logits(model, student))
    warm, other_share = settings.temperature, settings.reverse
    base_warm, ours_warm = (base / warm).log_softmax(-1), (ours / warm).log_softmax(-1)
    total = (1 - other_share) * _kl(base_warm, ours_warm)
    if other_share:
        total = total + other_share * _kl(ours_warm, base_warm)
    with torch.no_grad():
        plain = _kl(base.log_softmax(-1), ours.log_softmax(-1))
    return total * warm**2, plain


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum()


def _wide(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()
