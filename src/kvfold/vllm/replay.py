"""Skipped prompts on hybrids: upper layers with recurrent states besides keys and values.

As in `kvfold.runtime.skipping`, a request that leaves tokens out runs through the upper layers in
two passes: the anchors first, if they are in the step, then the last `replay` tokens. Between them
the recurrent states go on over what is left out: to what a state projector predicts, or to nothing,
as at the beginning of a text. All other requests are in the second pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.vllm.passes import context_of, repeatable_backend, some_pieces
from kvfold.vllm.projected import ProjectedStates
from kvfold.vllm.recurrent import RecurrentLayers
from kvfold.vllm.settings import Loaded
from kvfold.vllm.skip import KeptRows, kept_rows, step_of


class ReplayPasses:
    """How kept rows run through the upper layers of a hybrid."""

    def __init__(self, decoder: Any, loaded: Loaded, attending: Sequence[Any]) -> None:
        plan, described = loaded.plan, loaded.addon.base.anatomy
        assert plan.split is not None
        self.replay, self.anchors = plan.replay, plan.anchors
        self.names = [attention.layer_name for attention in attending]
        for attention in attending:
            attention.attn_backend = repeatable_backend(attention.attn_backend)
        self.recurrent = RecurrentLayers.of(decoder, described.layers[plan.split :])
        self.projected = ProjectedStates(self.recurrent, loaded)

    def weights_loaded(self) -> None:
        """Take what predicting states needs of the layers' weights."""
        self.projected.weights_loaded()

    def of(self, context: Any, hidden: Tensor) -> Iterator[tuple[Tensor, Any]] | None:
        """See `Passes`."""
        if not isinstance(context.attn_metadata, dict):
            return None
        common = context.attn_metadata[self.names[0]].kvfold_step.common
        if common.max_query_len <= self.replay:
            return None
        starts, seen = step_of(common)
        kept = kept_rows(starts, seen, self.replay, self.anchors)
        return None if kept is None else self._passes(context, hidden, kept, starts, seen)

    def _passes(
        self, context: Any, hidden: Tensor, kept: KeptRows, starts: list[int], seen: list[int]
    ) -> Iterator[tuple[Tensor, Any]]:
        anchors, rest = anchors_and_rest(kept)
        left_out = rows_left_out(kept, starts)
        begun = [r for r in left_out if starts[r + 1] - starts[r] == seen[r]]
        self.recurrent.clear(context, begun)
        if anchors:
            yield self._pass(context, hidden, some_pieces(kept, anchors))
        self.projected.advance(
            context, {request: hidden[rows.start : rows.stop] for request, rows in left_out.items()}
        )
        yield self._pass(context, hidden, some_pieces(kept, rest))

    def _pass(self, context: Any, hidden: Tensor, kept: KeptRows) -> tuple[Tensor, Any]:
        inside = context_of(context, kept, self.names, self.recurrent.names)
        return kept.rows.to(hidden.device), inside


def anchors_and_rest(kept: KeptRows) -> tuple[list[int], list[int]]:
    """Numbers of the pieces that are anchors, those that another of their request follows; and of
    the others."""
    followed = [a == b for a, b in itertools.pairwise([*kept.requests, -1])]
    numbers = range(len(followed))
    return [n for n in numbers if followed[n]], [n for n in numbers if not followed[n]]


def rows_left_out(kept: KeptRows, starts: list[int]) -> dict[int, range]:
    """The rows that are not kept, by request; they lie between its anchors and its replay."""
    found = {}
    ends = starts[:-1]
    for rows, request in zip(torch.split(kept.rows, kept.lengths), kept.requests, strict=True):
        first, last = int(rows[0]), int(rows[-1])
        if first > ends[request]:
            found[request] = range(ends[request], first)
        ends[request] = last + 1
    return found
