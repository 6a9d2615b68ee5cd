"""What a folded cache keeps for one pipeline: records of an unfinished group, codes of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kvfold.methods import Pipeline
from kvfold.runtime.buffers import refitted
from kvfold.runtime.layer import FoldedAttention
from kvfold.runtime.schedule import Schedule, Step
from kvfold.runtime.slots import CodeSlots


def code_store_needs(folds: Iterable[FoldedAttention]) -> tuple[bool, bool]:
    """What the layers that read one pipeline need of its store: `keep` and `late`."""
    folds = list(folds)
    keep = any(fold.reading in ("shared", "absorbed") for fold in folds)
    return keep, not all(fold.expands_early for fold in folds)


class CodeStore:
    """One pipeline's slots on the way: made when their last token arrives, seen by schedule.

    keep: whether readings need the codes themselves (`shared` or `absorbed`); they then stay in
    `slots`, in order. late: whether some layer expands a slot only when it becomes visible; codes
    of slots that are not wait in the ring `pending`, slot s at s mod its size; a long one is
    allocated as it fills. The tokens of an unfinished group (and with overlap those of the group
    before) are in the ring `partial`.
    spare: whether no reading needs the codes, only those who keep the cache elsewhere.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        *,
        keep: bool,
        late: bool,
        spare: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.schedule = schedule
        self.keep = keep
        self.late = late
        self.spare = spare
        group = schedule.group
        self.partial_size = group - 1 + (group if pipeline.overlap else 0)
        self.slots = CodeSlots(pipeline.depth.code_parts, pipeline.bits)
        self.partial: Tensor | None = None
        self.pending: Tensor | None = None
        self.published = False
        self.new: Tensor | None = None

    def publish(self, step: Step, records: Tensor) -> None:
        """Take the records of the step's columns, (batch, 1, new, record_width)."""
        self.published = True
        if self.partial is None:
            shape = (records.shape[0], 1, self.partial_size, records.shape[3])
            self.partial = records.new_zeros(shape)
        if any(step.completed):
            self.new = self._made(step, records)
            if self.keep:
                needed = max(span.stop for span in step.completed)
                self.slots.write(step.slot_write(step.completed, 0), self.new, needed)
        write = step.token_write(self.partial_size)
        if write is not None:
            write.apply(self.partial, records)

    def _made(self, step: Step, records: Tensor) -> Tensor:
        """Codes of the slots that this step completes, (batch, 1, most, code_width)."""
        group, a = self.schedule.group, self.schedule.anchors
        lead = group if self.pipeline.overlap else 0
        most = max(len(span) for span in step.completed)
        spans = [
            range(group * span.start - lead, group * (span.start + most)) for span in step.completed
        ]
        assert self.partial is not None
        tokens = _collect(
            step,
            self.partial,
            self.partial_size,
            records,
            spans,
            [max(0, step.before[row] - a) for row in step.rows],
            [a - step.after[row] + step.new for row in step.rows],
        )
        has_before = None
        if lead:
            first = torch.tensor([span.start for span in step.completed], device=records.device)
            has_before = first[:, None] + torch.arange(most, device=records.device) > 0
        return self.pipeline.slots(tokens[:, 0], has_before)[:, None]

    def completed(self, step: Step) -> Tensor:
        """Codes of the slots that this step made, (batch, 1, most, code_width)."""
        assert self.new is not None
        return self.new

    def exits(self, step: Step) -> Tensor:
        """Codes of the slots that become visible in this step, (batch, 1, most, code_width)."""
        self._prepare_pending(step)
        assert self.pending is not None
        made = [span.start for span in step.completed]
        moved = [-first for first in made]
        size = self.schedule.pending_size
        return _collect(step, self.pending, size, self.new, step.exits, made, moved)

    def _prepare_pending(self, step: Step) -> None:
        if self.new is None:
            return
        if self.pending is None:
            self.pending = self.new.new_zeros(self.new.shape[0], 1, 0, self.new.shape[3])
        held, places = self.pending.shape[2], self.schedule.pending_places(max(step.after))
        if places > held:
            self.pending = refitted(self.pending, held, places)

    def commit(self, step: Step) -> None:
        """End the step: its slots that nobody sees yet join the pending ring."""
        if self.late and self.new is not None:
            self._prepare_pending(step)
            if step.pending_write is not None and self.pending is not None:
                step.pending_write.apply(self.pending, self.new)
        self.new, self.published = None, False

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what `change` makes of it."""
        self.partial = None if self.partial is None else change(self.partial)
        self.pending = None if self.pending is None else change(self.pending)
        self.slots.map(change)

    def forget_spare(self) -> None:
        """Drop the codes, now and from now on, where no reading needs them."""
        if self.spare:
            self.keep = self.spare = False
            self.slots = CodeSlots(self.pipeline.depth.code_parts, self.pipeline.bits)

    def copied(self) -> CodeStore:
        """A store with tensors of its own."""
        made = CodeStore(
            self.pipeline, self.schedule, keep=self.keep, late=self.late, spare=self.spare
        )
        made.slots = self.slots.copied()
        made.partial = None if self.partial is None else self.partial.clone()
        made.pending = None if self.pending is None else self.pending.clone()
        return made

    def reset(self) -> None:
        """Forget everything, storage included."""
        self.partial = self.pending = self.new = None
        self.published = False
        self.slots = CodeSlots(self.pipeline.depth.code_parts, self.pipeline.bits)


def _collect(
    step: Step,
    ring: Tensor,
    size: int,
    new: Tensor | None,
    spans: Sequence[range],
    boundary: Sequence[int],
    shift: Sequence[int],
) -> Tensor:
    """Items of each row's span, padded to the longest: (batch, 1, most, width).

    Items below the row's boundary are in the ring, item i at i mod `size`, of whose places it may
    have only the first yet; the others are in `new` at i + shift.
    """
    if step.uniform:
        return _collect_alike(ring, size, new, spans[0], boundary[0], shift[0])
    most, held = max(len(span) for span in spans), ring.shape[2]
    places = [
        [item % size if item < first else held + item + moved for item in span]
        for span, first, moved in zip(spans, boundary, shift, strict=True)
    ]
    both = ring if new is None else torch.cat([ring, new], dim=2)
    padded = [row + [0] * (most - len(row)) for row in places]
    index = torch.tensor(padded, device=ring.device).clamp_(max=both.shape[2] - 1)
    return both.gather(2, index[:, None, :, None].expand(-1, 1, -1, both.shape[3]))


def _collect_alike(
    ring: Tensor, size: int, new: Tensor | None, span: range, boundary: int, shift: int
) -> Tensor:
    pieces = []
    old = [item % size for item in range(span.start, min(span.stop, boundary))]
    if old and old[-1] - old[0] == len(old) - 1:
        pieces.append(ring[:, :, old[0] : old[-1] + 1])
    elif old:
        pieces.append(ring.index_select(2, torch.tensor(old, device=ring.device)))
    fresh = range(max(span.start, boundary), span.stop)
    if fresh:
        assert new is not None
        pieces.append(new[:, :, fresh.start + shift : fresh.stop + shift])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
