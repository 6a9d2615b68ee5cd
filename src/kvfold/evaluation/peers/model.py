"""A model that runs elsewhere: what tasks call like any other, while a worker does the forwards.

A call without a cache is a new prompt: the worker reads its context, compresses what the cache
holds of it, and then reads the question, whose logits come back. A call with a cache goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.evaluation.peers.budget import Budget
from kvfold.evaluation.peers.process import WorkerProcess

HIDDEN = -1
"""Key of the final hidden states among the layers'."""

_HIDDEN_NAME = "hidden"


class PeerCache:
    """Rows in a worker's memory; they are given up with this object."""

    def __init__(self, numbers: Sequence[int], worker: WorkerProcess, dropped: list[int]) -> None:
        self.numbers, self.worker, self.dropped = list(numbers), worker, dropped

    def nbytes(self) -> list[int]:
        """Bytes of the storages of each row."""
        return [int(count) for count in self._measured()["real"]]

    def kept_bytes(self) -> list[int]:
        """`nbytes` without keys and values that are only hidden from attention."""
        return [int(count) for count in self._measured()["kept"]]

    def _measured(self) -> dict[str, Any]:
        return self.worker.ask("bytes", caches=self.numbers)[0]

    def __deepcopy__(self, _: dict[int, Any]) -> PeerCache:
        made = self.worker.ask("copy", caches=self.numbers)[0]["caches"]
        return PeerCache(made, self.worker, self.dropped)

    def __del__(self) -> None:
        self.dropped.extend(self.numbers)


@dataclass(frozen=True)
class PeerOutput:
    """logits: (batch, seq, vocab) float32. cache: of all that was read."""

    logits: Tensor
    cache: PeerCache

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass
class _Columns:
    count: int
    taken: dict[int, Tensor]


class PeerModel:
    """A peer as a causal model. plain: the same model here, with nothing attached."""

    def __init__(self, plain: Any, worker: WorkerProcess, budget: Budget) -> None:
        self.plain, self.worker, self.budget = plain, worker, budget
        self.device, self.generation_config = plain.device, plain.generation_config
        self.dropped: list[int] = []
        self._questions: Sequence[int] | None = None
        self._columns: _Columns | None = None

    def asking(self, questions: Sequence[int]) -> PeerModel:
        """The same peer, which knows how many of a new prompt's last tokens are its question.

        questions: of each row of the next prompts, at least 1. Without it every prompt's last
        token is its question, so that no prediction is made before the compression.
        """
        found = copy.copy(self)
        found._questions = [max(1, question) for question in questions]
        return found

    @contextmanager
    def last_columns(self, count: int) -> Iterator[dict[int, Tensor]]:
        """Fills in, as prompts are read, the last `count` positions of all calls together.

        By layer, the output of its attention, (batch, count, hidden) on the CPU; and the final
        hidden states, under `HIDDEN`, where logits were asked for. Contexts have none.
        """
        self._columns = _Columns(count, {})
        try:
            yield self._columns.taken
        finally:
            self._columns = None

    def __call__(self, *arguments: Any, **named: Any) -> PeerOutput:
        """`forward`, as modules are called."""
        return self.forward(*arguments, **named)

    def forward(
        self,
        input_ids: Tensor,
        *,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        cache: PeerCache | None = None,
    ) -> PeerOutput:
        """Feed tokens, (batch, seq) int64 without pads, to a cache, or to a new one for None.

        Logits are of all new tokens, or of the last one for `logits_to_keep=1`; of a new prompt,
        of its question's at most. use_cache: a peer always has one.
        """
        rows = input_ids.tolist()
        keep = "last" if logits_to_keep == 1 else "all"
        asked: dict[str, Any] = {"rows": rows, "keep": keep, "drop": self._drop()}
        asked["columns"] = 0 if self._columns is None else self._columns.count
        if cache is None:
            questions = self._questions or [1] * len(rows)
            lengths = [len(ids) for ids in rows]
            kept = map(self.budget.kept, lengths, questions)
            data, tensors = self.worker.ask("read", questions=questions, kept=list(kept), **asked)
            cache = PeerCache(data["caches"], self.worker, self.dropped)
        else:
            _, tensors = self.worker.ask("go_on", caches=cache.numbers, **asked)
        logits = tensors.pop("logits").to(self.device)
        self._take(tensors)
        return PeerOutput(logits, cache)

    def _drop(self) -> list[int]:
        """Rows that nobody holds any more; they are named once."""
        numbers = self.dropped[:]
        del self.dropped[: len(numbers)]
        return numbers

    def _take(self, tensors: dict[str, Tensor]) -> None:
        if self._columns is None:
            return
        count, taken = self._columns.count, self._columns.taken
        for name, new in tensors.items():
            key = HIDDEN if name == _HIDDEN_NAME else int(name)
            every = torch.cat([taken[key], new], dim=1) if key in taken else new
            taken[key] = every[:, -count:]
