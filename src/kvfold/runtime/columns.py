"""Which token each column of a cache is, row by row.

Folded layers count real tokens only, but layers that are not folded keep a place for every column,
pads too, and a state that outlives its process must say which text it stands for. Both need to be
told what the columns were.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD = -1
UNKNOWN = -2
"""A token that came as an embedding, without an id."""
MANY = 64
"""Pieces that are joined at once, so that a step copies only itself."""


class ColumnLog:
    """Ids of all columns seen, 4 bytes each: (rows, columns) int32, `PAD` where there is none."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    def append(self, ids: Tensor, valid: Tensor | None = None) -> None:
        """Note new columns.

        ids: (rows, new); they are copied. valid: (rows or 1, new) bool, which are tokens; None:
        all.
        """
        made = ids.to(torch.int32, copy=True)
        if valid is not None:
            made.masked_fill_(~valid.to(made.device), PAD)
        self._pieces.append(made)
        if len(self._pieces) > MANY:
            self.table()

    def table(self) -> Tensor:
        """All columns, (rows, columns) int32; (0, 0) before any."""
        if not self._pieces:
            return torch.zeros(0, 0, dtype=torch.int32)
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces, dim=1)]
        return self._pieces[0]

    def row(self, row: int) -> tuple[Tensor, Tensor]:
        """A row's token ids, (tokens,) int32, and the columns that they are in."""
        columns = self.table()[row]
        places = (columns != PAD).nonzero()[:, 0]
        return columns[places], places

    def select(self, index: Tensor) -> None:
        """Row i becomes row index[i]."""
        if self._pieces:
            table = self.table()
            self._pieces = [table.index_select(0, index.to(table.device))]

    def crop(self, columns: int) -> None:
        """Keep only the first columns."""
        if self._pieces:
            self._pieces = [self.table()[:, :columns].clone()]

    def copied(self) -> ColumnLog:
        """A log of its own; what is noted never changes, so it need not be copied."""
        made = ColumnLog()
        made._pieces = list(self._pieces)
        return made
