"""What one call of an attached model's decoder was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvfold.runtime.cache import FoldedCache


@dataclass(frozen=True)
class DecoderCall:
    """Arguments of one call.

    kwargs: what is handed on as it is. inputs: input_ids and inputs_embeds, either of them None.
    tokens: which of the new columns are tokens, (batch, columns) bool on the CPU.
    """

    kwargs: dict[str, Any]
    inputs: dict[str, Tensor | None]
    cache: FoldedCache
    attention_mask: Tensor | None
    tokens: Tensor

    @property
    def batch(self) -> int:
        """Rows."""
        return self.tokens.shape[0]

    @property
    def columns(self) -> int:
        """New columns, pads included."""
        return self.tokens.shape[1]

    def counts(self, start: int, stop: int) -> list[int]:
        """Tokens of each row in some of the columns."""
        return [int(n) for n in self.tokens[:, start:stop].sum(dim=1).tolist()]
