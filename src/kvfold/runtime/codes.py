"""What a folded cache keeps for one method: its codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.methods import DepthMethod
from kvfold.runtime.buffers import grown
from kvfold.runtime.schedule import Schedule, Step


class CodeStore:
    """The codes of one method: all of them if some layer reads codes, else only the pending.

    keep: whether readings need the codes themselves (`shared` or `absorbed`). Kept codes are
    (batch, 1, tokens after the anchors, code_width) in order; pending ones are a ring of R
    places, position p at (p - A) mod R.
    """

    def __init__(self, method: DepthMethod, schedule: Schedule, *, keep: bool) -> None:
        self.method = method
        self.schedule = schedule
        self.keep = keep
        self.codes: Tensor | None = None
        self.new: Tensor | None = None

    def publish(self, step: Step, codes: Tensor) -> None:
        """Take the codes of the step's columns: (batch, 1, new, code_width)."""
        self.new = codes
        if self.codes is None:
            size = 0 if self.keep else self.schedule.ring_size
            self.codes = codes.new_zeros(codes.shape[0], 1, size, codes.shape[3])
        if self.keep and step.code_write is not None:
            longest = max(step.after) - self.schedule.anchors
            self.codes = grown(self.codes, 0, longest)
            step.code_write.apply(self.codes, codes)

    def exits(self, step: Step) -> Tensor:
        """Codes of the step's exits, (batch, 1, most_exits, code_width)."""
        ring, a = self.schedule.ring_size, self.schedule.anchors
        assert self.codes is not None
        if self.keep:
            return _gather(self.codes, [list(span) for span in step.exits], step)
        places = [
            [
                (slot % ring if slot + a < step.before[row] else ring + step._column(row, slot + a))
                for slot in span
            ]
            for row, span in zip(step.rows, step.exits, strict=True)
        ]
        if all(place < ring for row in places for place in row):
            return _gather(self.codes, places, step)
        assert self.new is not None
        return _gather(torch.cat([self.codes, self.new], dim=2), places, step)

    def commit(self, step: Step) -> None:
        """End the step: new codes join the pending ring."""
        if not self.keep and self.codes is not None and self.new is not None:
            write = step.pending_write
            if write is not None:
                write.apply(self.codes, self.new)
        self.new = None

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        if self.codes is not None:
            self.codes = self.codes.index_select(0, index.to(self.codes.device))

    def copied(self) -> CodeStore:
        """A store with codes of its own."""
        made = CodeStore(self.method, self.schedule, keep=self.keep)
        made.codes = None if self.codes is None else self.codes.clone()
        return made

    def reset(self) -> None:
        """Forget everything, storage included."""
        self.codes = self.new = None


def _gather(source: Tensor, places: Sequence[Sequence[int]], step: Step) -> Tensor:
    """source (batch, 1, places, width) at the named places of each row, padded to the longest."""
    longest = max(len(row) for row in places)
    if step.uniform:
        row = places[0]
        if row[-1] - row[0] == longest - 1:
            return source[:, :, row[0] : row[-1] + 1]
        return source.index_select(2, torch.tensor(list(row), device=source.device))
    padded = [list(row) + [0] * (longest - len(row)) for row in places]
    index = torch.tensor(padded, device=source.device)[:, None, :, None]
    return source.gather(2, index.expand(-1, 1, -1, source.shape[3]))
