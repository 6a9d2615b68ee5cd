"""Prefill skipping: most of a prompt runs through the lower layers only.

All new tokens run through the layers below the split. Of each row that has more than `replay`
of them, the last `replay` run through the layers from the split on as well, with their own exact
keys and values, and so do the row's anchors. The tokens between leave only their codes there:
the upper layers' history is made from H_s alone. A row without more tokens skips nothing.

Upper layers run on hidden states instead of token ids, in passes of their own that leave the lower
layers out: one for the anchors, when the last of them has come, and one for the replay. Rows end
in the same column, so that the replay's columns are the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.methods import Source
from kvfold.runtime.cache import Running, StepKey
from kvfold.runtime.call import DecoderCall
from kvfold.runtime.schedule import Schedule, Skipped, Step

if TYPE_CHECKING:
    from kvfold.runtime.attach import Attachment
    from kvfold.runtime.forward import DecoderForward

PREFILL_CHUNK = 512
"""Tokens of a folded prompt that run at once; bounds memory, and masks made by transformers."""

PLAIN_CHUNK = 2048
"""The same where only layers run that are not folded: without a mask attention is far quicker."""


class SkippedPrefill:
    """One call in which some row has more new tokens than are replayed."""

    def __init__(self, attachment: Attachment, forward: DecoderForward, call: DecoderCall) -> None:
        assert attachment.split is not None
        self.attachment, self.forward, self.call = attachment, forward, call
        self.split: int = attachment.split
        replay = attachment.plan.replay
        self.cut = call.columns - replay
        counts = call.counts(0, call.columns)
        self.before = call.cache.rows or [0] * call.batch
        self.exact_from = [
            seen + count - replay if count > replay else 0
            for seen, count in zip(self.before, counts, strict=True)
        ]
        self.seen = list(self.before)
        self.tails: dict[Source, list[Tensor]] = {}
        self.anchors = _Anchors(attachment.plan.anchors, self.before, self.exact_from)
        assert attachment.skipped_states is not None
        self.states = attachment.skipped_states

    def run(self, chunks: Sequence[tuple[int, int]]) -> Any:
        """All passes; returns the decoder's output for the replayed columns.

        A failure between two of them leaves a cache that says so when it is used again.
        """
        cache = self.call.cache
        cache.half_way = True
        self._run_lower(chunks)
        self.states.require_finite()
        output = self._replay()
        cache.half_way = False
        return output

    def _run_lower(self, chunks: Sequence[tuple[int, int]]) -> None:
        for start, stop in chunks:
            found: dict[Source, Tensor] = {}
            self.forward.run(self.call, start, stop, self._lower_pass(start, stop), found)
            self._keep_tail(found, start, stop)
            if start < self.cut:
                end = min(stop, self.cut)
                hidden = found[Source("hidden", self.split)][:, : end - start]
                counts = self.call.counts(start, end)
                self._run_anchors(hidden, counts)
                self._advance_states(hidden, counts)
                self.seen = [n + count for n, count in zip(self.seen, counts, strict=True)]

    def _lower_pass(self, start: int, stop: int) -> Running:
        """Lower layers get all columns, upper layers the codes of those that skip them."""
        attachment, call = self.attachment, self.call
        folded = attachment.plan.prefill_attention == "folded" or stop - start == 1
        full = attachment.full_pass(
            call.cache, stop - start, call.counts(start, stop), folded=folded
        )
        steps: dict[StepKey, Step] = {k: step for k, step in full.steps.items() if not k[1]}
        if start < self.cut:
            counts = call.counts(start, min(stop, self.cut))
            new = min(stop, self.cut) - start
            for group, schedule in attachment.schedules.items():
                steps[group, True] = self._skipping_step(schedule, new, counts)
        return Running(steps, range(self.split), full.tokens)

    def _skipping_step(self, schedule: Schedule, new: int, counts: list[int]) -> Step:
        """Slots of tokens that skip the upper layers are visible there as soon as they are made."""
        after = [n + count if count else 0 for n, count in zip(self.seen, counts, strict=True)]
        shown = [
            schedule.made(n) if n > first else schedule.slots(n)
            for n, first in zip(self.seen, self.before, strict=True)
        ]
        return self._step(schedule, self.seen, new, counts, Skipped(after, shown))

    def _step(
        self,
        schedule: Schedule,
        before: Sequence[int],
        new: int,
        counts: Sequence[int],
        skipped: Skipped | None = None,
    ) -> Step:
        device = self.attachment.model.device
        return Step(schedule, before, new, counts, folded=True, device=device, skipped=skipped)

    def _keep_tail(self, found: dict[Source, Tensor], start: int, stop: int) -> None:
        """Hold on to the replayed columns of every hidden state that upper layers draw on."""
        if stop > self.cut:
            first = max(0, self.cut - start)
            for source, tensor in found.items():
                if source.kind == "hidden":
                    self.tails.setdefault(source, []).append(tensor[:, first:].clone())

    def _upper_pass(self, steps: dict[int, Step]) -> Running:
        layers = range(self.split, self.attachment.anatomy.num_layers)
        return Running({(group, True): step for group, step in steps.items()}, layers, None)

    def _run_anchors(self, hidden: Tensor, counts: list[int]) -> None:
        """The upper layers on the anchors of the rows whose last anchor is in these columns.

        Rows with equally many at once: pads before a token would enter a row's recurrent state.
        """
        self.anchors.take(hidden, self.seen, counts)
        ready = self.anchors.ready(self.seen, counts)
        lengths = [
            len(span) if row else 0 for row, span in zip(ready, self.anchors.spans, strict=True)
        ]
        for length in sorted(set(lengths) - {0}):
            self._run_anchors_of([own == length for own in lengths])

    def _run_anchors_of(self, rows: list[bool]) -> None:
        gathered, lengths = self.anchors.of(rows)
        others = [not row for row in rows]
        new = gathered.shape[1]
        steps = {
            group: self._step(schedule, self.before, new, lengths)
            for group, schedule in self.attachment.schedules.items()
        }
        cache = self.call.cache
        kept = self.states.of(cache, others)
        step = next(iter(steps.values()))
        self.forward.run_upper(self.call, gathered, step, self._upper_pass(steps), {})
        self.states.restore(cache, others, kept)

    def _advance_states(self, hidden: Tensor, counts: list[int]) -> None:
        """Let the upper recurrent states go on over these columns' tokens beyond the anchors."""
        columns = torch.arange(hidden.shape[1] - 1, -1, -1, device=hidden.device)
        last = [n + count for n, count in zip(self.seen, counts, strict=True)]
        positions = torch.tensor(last, device=hidden.device)[:, None] - 1 - columns
        first = [
            max(n, min(self.anchors.count, exact)) if count else 2**62
            for n, count, exact in zip(self.seen, counts, self.exact_from, strict=True)
        ]
        valid = positions >= torch.tensor(first, device=hidden.device)[:, None]
        self.states.advance(self.call.cache, hidden, valid)

    def _replay(self) -> Any:
        """The last columns through the upper layers; returns the decoder's output."""
        tails = {source: torch.cat(parts, dim=1) for source, parts in self.tails.items()}
        before = [max(pair) for pair in zip(self.before, self.exact_from, strict=True)]
        shown = {
            group: [
                schedule.made(exact) if exact else schedule.slots(first)
                for first, exact in zip(self.before, self.exact_from, strict=True)
            ]
            for group, schedule in self.attachment.schedules.items()
        }
        outputs = []
        replay = self.call.columns - self.cut
        for start in range(0, replay, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, replay)
            counts = self.call.counts(self.cut + start, self.cut + stop)
            steps = {
                group: self._step(
                    schedule, before, stop - start, counts, Skipped(self.exact_from, shown[group])
                )
                for group, schedule in self.attachment.schedules.items()
            }
            found = {source: tail[:, start:stop] for source, tail in tails.items()}
            hidden = found[Source("hidden", self.split)]
            step = next(iter(steps.values()))
            running = self._upper_pass(steps)
            outputs.append(self.forward.run_upper(self.call, hidden, step, running, found))
            before = step.after
            rows = range(len(before))
            shown = {g: [s.visible(r, s.after[r]) for r in rows] for g, s in steps.items()}
        first = outputs[0]
        first.last_hidden_state = torch.cat([o.last_hidden_state for o in outputs], dim=1)
        return first


class _Anchors:
    """H_s of each row's anchors, gathered until the last of them has come.

    count: A. before: tokens seen of each row. exact_from: where its replay begins, 0 for a row that
    skips nothing and needs no pass of its own.
    """

    def __init__(self, count: int, before: Sequence[int], exact_from: Sequence[int]) -> None:
        self.count = count
        self.before = before
        self.spans = [
            range(first, min(count, exact)) if exact else range(0)
            for first, exact in zip(before, exact_from, strict=True)
        ]
        self.hidden: Tensor | None = None

    def take(self, hidden: Tensor, seen: Sequence[int], counts: Sequence[int]) -> None:
        """Pick the anchors out of some columns, which are each row's tokens from `seen` on."""
        for row, (span, n, count) in enumerate(zip(self.spans, seen, counts, strict=True)):
            here = range(max(span.start, n), min(span.stop, n + count))
            if not here:
                continue
            if self.hidden is None:
                self.hidden = hidden.new_zeros(hidden.shape[0], self.count, hidden.shape[2])
            column = hidden.shape[1] - n - count
            columns = slice(here.start + column, here.stop + column)
            self.hidden[row, here.start : here.stop] = hidden[row, columns]

    def ready(self, seen: Sequence[int], counts: Sequence[int]) -> list[bool]:
        """Rows whose last anchor is among these tokens."""
        return [
            bool(span) and n < span.stop <= n + count
            for span, n, count in zip(self.spans, seen, counts, strict=True)
        ]

    def of(self, rows: Sequence[bool]) -> tuple[Tensor, list[int]]:
        """Anchors of some rows, aligned to the right: (batch, most, hidden), and how many."""
        assert self.hidden is not None
        lengths = [len(span) if row else 0 for row, span in zip(rows, self.spans, strict=True)]
        made = self.hidden.new_zeros(len(lengths), max(lengths), self.hidden.shape[2])
        for row, (length, span) in enumerate(zip(lengths, self.spans, strict=True)):
            if length:
                made[row, -length:] = self.hidden[row, span.start : span.stop]
        return made, lengths
