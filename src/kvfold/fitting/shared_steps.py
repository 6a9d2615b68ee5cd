"""Steps that several workers take as one: the same start, and gradients averaged.

Every worker has all weights and the whole optimiser, and takes its share of a step's rows. With the
same start, the same averaged gradients and the same draws, all of them stay equal bit for bit, so
nothing but gradients and a few numbers is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import FitError
from kvfold.fitting.workers import Workers
from kvfold.runtime.sharding import is_sharded


def require_even(workers: Workers, rows: int, stage: str) -> None:
    """Raise `FitError` unless a step's rows can be shared out in equal parts."""
    if rows % workers.count:
        raise FitError(
            f"{stage}'s rows of a step must be divisible by the number of workers, so that each "
            f"takes as many; got {rows} rows for {workers.count} workers; change rows, or start "
            "another number"
        )


def require_even_looks(workers: Workers, model: Any, batches: int) -> None:
    """Raise `FitError` where a model's layers are spread and held-out rows can't be shared evenly.

    A worker that runs the model once more than the others would wait for their weights for ever.
    """
    if batches % workers.count and is_sharded(model):
        raise FitError(
            "on a sharded model every worker must look at as many batches of held-out rows; got "
            f"{batches} for {workers.count} workers; change held_out, or rows of a step"
        )


@torch.no_grad()
def start_alike(workers: Workers, optimizer: torch.optim.Optimizer) -> None:
    """Give every worker the first one's weights, and its scales of steps (see `ScaledAdam`)."""
    if workers.count == 1:
        return
    for group in optimizer.param_groups:
        workers.same_weights(group["params"])
        scale = group["scale"]
        if isinstance(scale, Tensor):
            workers.all_of_first(scale)
        else:
            number = torch.tensor([scale], dtype=torch.float64, device=workers.device)
            group["scale"] = float(workers.all_of_first(number))


@torch.no_grad()
def average_gradients(workers: Workers, weights: Iterable[Tensor]) -> None:
    """Give every worker the mean of all workers' gradients, in one exchange for each dtype."""
    if workers.count == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for weight in weights:
        if weight.grad is not None:
            by_dtype.setdefault(weight.grad.dtype, []).append(weight.grad)
    for gradients in by_dtype.values():
        flat = workers.all_mean(torch.cat([gradient.flatten() for gradient in gradients]))
        means = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def summed(workers: Workers, numbers: Sequence[float]) -> list[float]:
    """The sums over workers of a few numbers, the same bits on all."""
    if workers.count == 1:
        return list(numbers)
    mine = torch.tensor(numbers, dtype=torch.float64, device=workers.device)
    found: list[float] = workers.all_sum(mine).tolist()
    return found
