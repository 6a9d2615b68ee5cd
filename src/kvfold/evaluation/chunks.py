"""Log-probabilities a few rows at a time, shared by every measure that needs them.

The logits of one window over a vocabulary of 50,000 cost more memory, and on a CPU more time, than
the layers below them. So measures are fed chunks of `CHUNK_ROWS` positions, and a full matrix of
logits never exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvfold.runtime.logits import logits

CHUNK_ROWS = 128


@dataclass(frozen=True)
class LogitChunk:
    """Scored positions of some windows.

    log_probs, base_log_probs: (rows, vocab), of the measured and of the plain model, at least
    float32. targets: (rows,) int64, the token that really follows.
    """

    log_probs: Tensor
    base_log_probs: Tensor
    targets: Tensor


class Measure(Protocol):
    """Something that adds up over chunks and has named results at the end."""

    def update(self, chunk: LogitChunk) -> None:
        """Count one more chunk in."""

    def result(self) -> dict[str, float]:
        """The figures over all chunks so far."""


def _log_probs(model: Any, hidden: Tensor) -> Tensor:
    scores = logits(model, hidden)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.log_softmax(wide, dim=-1)


@torch.no_grad()
def logit_chunks(
    model: Any,
    input_ids: Tensor,
    hidden: Tensor,
    base_hidden: Tensor | None = None,
    *,
    rows: int = CHUNK_ROWS,
) -> Iterator[LogitChunk]:
    """Every scored position of a batch of windows, `rows` at a time.

    input_ids: (batch, seq). hidden, base_hidden: (batch, seq, hidden), final hidden states; without
    base_hidden the model is its own base. The last position of a window is left out, as nothing
    follows it, so the first token is never a target.
    """
    targets = input_ids[:, 1:].reshape(-1)
    measured = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    base = None if base_hidden is None else base_hidden[:, :-1].reshape(measured.shape)
    for start in range(0, targets.shape[0], rows):
        part = slice(start, start + rows)
        log_probs = _log_probs(model, measured[part])
        base_log_probs = log_probs if base is None else _log_probs(model, base[part])
        yield LogitChunk(log_probs, base_log_probs, targets[part])
