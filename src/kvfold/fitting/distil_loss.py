"""How far a student's predictions are from its teacher's, and which way it should move.

`loss = T^2 KL(teacher_T || student_T) + weight * |h - h_t|^2 / |h_t|^2`, both means over tokens,
with distributions at temperature T and h the final hidden states. A share of the KL may be taken
the other way round (student || teacher), which seeks modes instead of covering them.

Logits cost more than the layers of a small model, so they are made for a few rows at a time: each
chunk's gradient in the hidden states is worked out and its logits are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import FitError
from kvfold.runtime.logits import logits

CHUNK_ROWS = 128
"""Positions whose logits exist at once."""


@dataclass(frozen=True)
class LossSettings:
    """What a student is held to.

    temperature: of the KL, above 0. hidden_weight: of the final hidden states' squared error,
    relative to their size; 0 leaves it out. reverse: the share of the KL that is taken from the
    student to the teacher, from 0 to 1. Raises `FitError` for other values.
    """

    temperature: float = 2.0
    hidden_weight: float = 1.0
    reverse: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise FitError(f"the temperature must be above 0; got {self.temperature}")
        if not (math.isfinite(self.hidden_weight) and self.hidden_weight >= 0):
            raise FitError(f"hidden_weight must be at least 0; got {self.hidden_weight}")
        if not 0 <= self.reverse <= 1:
            raise FitError(f"reverse must be a share from 0 to 1; got {self.reverse}")


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
    found, _ = _walk(model, student.detach(), teacher, settings or LossSettings(), learn=False)
    return found


def distance_and_gradient(
    model: Any, student: Tensor, teacher: Tensor, settings: LossSettings
) -> tuple[Distance, Tensor]:
    """The same, and the gradient of `loss` in the student's hidden states, of their shape."""
    found, gradient = _walk(model, student.detach(), teacher, settings, learn=True)
    assert gradient is not None
    return found, gradient


def _walk(
    model: Any, student: Tensor, teacher: Tensor, settings: LossSettings, *, learn: bool
) -> tuple[Distance, Tensor | None]:
    ours, theirs = student.flatten(0, -2), teacher.flatten(0, -2)
    count = len(ours)
    size = theirs.double().pow(2).sum().clamp_min(torch.finfo(torch.float32).tiny)
    gradient = torch.zeros_like(ours) if learn else None
    totals = torch.zeros(3, dtype=torch.float64, device=ours.device)
    for rows in _chunks(count):
        hidden = ours[rows].requires_grad_(learn)
        with torch.set_grad_enabled(learn):
            softened, plain = _divergence(model, hidden, theirs[rows], settings)
            error = (hidden - theirs[rows]).to(softened.dtype).pow(2).sum() / size
            loss = softened / count + settings.hidden_weight * error
        if gradient is not None:
            (gradient[rows],) = torch.autograd.grad(loss, hidden)
        totals += torch.stack([loss.detach(), plain / count, error.detach()]).double()
    loss_, kl, error_ = totals.tolist()
    return Distance(loss_, kl, error_), None if gradient is None else gradient.view_as(student)


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, CHUNK_ROWS):
        yield slice(start, min(start + CHUNK_ROWS, count))


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
