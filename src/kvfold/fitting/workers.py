"""The processes of a fit that runs on several at once: what they add up, and when one is lost.

Each worker has the whole model and takes its share of the text; sums over workers make them agree.
A process alone needs nothing. Several are started by `accelerate launch` or `torchrun` and find
each other through accelerate's `PartialState` (gloo on CPUs, nccl on CUDA devices). Every worker
must make the same calls in the same order. When one dies, or says nothing for `timeout`, the
others raise a `FitError` at their next call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from kvfold.errors import FitError, MissingExtraError

TIMEOUT = timedelta(minutes=10)
"""Silence after which a worker is taken for lost: longer than any one batch or solution takes."""


@dataclass(frozen=True)
class Workers:
    """This process and its number among `count`: alone, unless `join` found others.

    device: where tensors must be to be exchanged.
    """

    rank: int = 0
    count: int = 1
    device: str = "cpu"

    @classmethod
    def join(cls, *, cpu: bool = False, timeout: timedelta = TIMEOUT) -> Workers:
        """The workers that this process was started with: itself alone, without a launcher.

        cpu: stay on CPUs and gloo where there are other devices. timeout: of every call. Raises
        `MissingExtraError` without accelerate, `FitError` if the others can't be reached.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        state_class = _partial_state()
        with _loss_explained():
            state = state_class(cpu=cpu, timeout=timeout)
        return cls(int(state.process_index), int(state.num_processes), str(state.device))

    def own_device(self, named: str | None) -> str | None:
        """Where this worker's model belongs: among several, a device of its own for each.

        named: what was asked for; a device with a number is left as it is.
        """
        kind = self.device.partition(":")[0]
        return self.device if self.count > 1 and named in (None, kind) else named

    def leave(self) -> None:
        """Say goodbye to the others at the end; nothing can be exchanged any more."""
        if self.count > 1:
            self.barrier()
            _partial_state()().destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the worker that shows bars and writes files."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """This worker's rows, one after another; none where there are fewer rows than workers."""
        return rows.tensor_split(self.count)[self.rank]

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum over workers, in place and given back; equal bit for bit on every worker."""
        if self.count > 1:
            with _loss_explained():
                distributed.all_reduce(tensor)
        return tensor

    def all_mean(self, tensor: Tensor) -> Tensor:
        """The mean over workers, in place and given back."""
        return self.all_sum(tensor).div_(self.count)

    def joined(self, rows: Tensor) -> Tensor:
        """The rows of all workers, one's after another's, on the device of `rows`.

        All must have as many, of the same shape and dtype.
        """
        if self.count == 1:
            return rows
        all_rows = torch.zeros(self.count, *rows.shape, dtype=rows.dtype, device=self.device)
        all_rows[self.rank] = rows
        return self.all_sum(all_rows).flatten(0, 1).to(rows.device)

    def all_of_first(self, tensor: Tensor) -> Tensor:
        """The first worker's tensor, in place and given back; all must have its shape and dtype."""
        if self.count > 1:
            with _loss_explained():
                distributed.broadcast(tensor, src=0)
        return tensor

    def agree(self, name: str, *numbers: int) -> None:
        """Raise `FitError` unless every worker has the same numbers."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        wanted = self.all_of_first(mine.clone())
        differing = self.all_sum((mine != wanted).any().double().view(1))
        if differing.item():
            raise FitError(
                f"all workers must have the same {name}; {int(differing.item())} of {self.count} "
                "differ from the first; give every worker the same files and arguments (a "
                "checkpoint must be in a folder that all of them see)"
            )

    @torch.no_grad()
    def same_weights(self, weights: Iterable[Tensor]) -> None:
        """Give every worker the first one's weights, whatever their processors round to."""
        for weight in weights:
            self.all_of_first(weight)

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self.all_sum(torch.zeros(1, device=self.device))


ALONE = Workers()


def _partial_state() -> Any:
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise MissingExtraError(
            "a fit on several processes needs accelerate; install the extra with "
            "pip install 'kvfold[train]', or start one process"
        ) from error
    return PartialState


@contextmanager
def _loss_explained() -> Iterator[None]:
    """Say what the backends' errors mean: closed connections and timeouts are RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise FitError(
            "every worker must go on until the end, and one of them is lost or can't be reached "
            f"({reason}); see what it said last, then start all of them again with the same "
            "checkpoint to go on from there"
        ) from error
