"""Pooling: several tokens of the history become one slot, a learned weighted average.

`slot = sum_i w_i x_i` with `w = softmax_i(score_i + ape_i)` over the slot's r tokens (source: the
second model card's `HiddenStateCompressor`, a `Linear(hidden, 1)` and a position bias). What is
averaged is a token's stored code; k_proj, v_proj and linear readers commute with an average whose
weights sum to 1, so this equals averaging hidden states before the projection, as the card does,
and the maps of a depth method apply to slots as they do to tokens.

With all weights zero, as built, a slot is the plain mean of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from kvfold.methods.base import CodePart

Gate = Literal["mean", "token", "head", "channel"]


class PoolGate(nn.Module):
    """The gate of one code, and the logit bias of the layers that read its slots.

    parts: of the code. hidden_size: of what tokens are scored by. query_heads: of each layer that
    reads the slots. group: r. gate: `mean` (no score), `token` (one score), `head` (one for each
    head of each part) or `channel` (one for each value: its head's, and a part of its own through
    `gate_rank` values). overlap: a slot is `(1 - m) * own average + m * average of the group
    before`, with a learned m that starts at 0. mass_bias: whether each query head of each layer
    has a learned bias on slots.
    """

    def __init__(
        self,
        parts: tuple[CodePart, ...],
        hidden_size: int,
        query_heads: Mapping[int, int],
        group: int,
        *,
        gate: Gate = "token",
        gate_rank: int = 16,
        overlap: bool = False,
        mass_bias: bool = True,
    ) -> None:
        super().__init__()
        self.group = group
        self.gate: Gate = gate
        self.overlap = overlap
        self.parts = parts
        code_width = sum(part.heads * part.width for part in parts)
        heads = sum(part.heads for part in parts)
        self.weights_width = {"mean": 1, "token": 1, "head": heads, "channel": code_width}[gate]
        self.heads = heads
        widths = {"mean": 0, "token": 1, "head": heads, "channel": heads + gate_rank}
        self.score_width = widths[gate]
        self.score = (
            nn.Linear(hidden_size, self.score_width, bias=False) if gate != "mean" else None
        )
        self.expand = nn.Linear(gate_rank, code_width, bias=False) if gate == "channel" else None
        shape = (group, self.weights_width)
        self.ape = nn.Parameter(torch.zeros(shape)) if gate != "mean" else None
        self.ape_before = nn.Parameter(torch.zeros(shape)) if gate != "mean" and overlap else None
        self.carry = nn.Parameter(torch.zeros(self.weights_width)) if overlap else None
        self.mass = nn.ParameterDict(
            {str(n): nn.Parameter(torch.zeros(h)) for n, h in query_heads.items() if mass_bias}
        )
        self._zero()

    def _zero(self) -> None:
        """The plain mean; of a channel gate's two matrices only one may be zero, or neither
        would ever get a gradient."""
        if self.score is None:
            return
        nn.init.zeros_(self.score.weight)
        if self.expand is not None:
            nn.init.zeros_(self.expand.weight)
            own = self.score.weight[self.heads :]
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(own.shape, generator=generator, device="cpu")
            if not own.is_meta:
                with torch.no_grad():
                    own.copy_(drawn / self.score.in_features**0.5)

    def scores(self, hidden: Tensor) -> Tensor:
        """What is kept of each token until its slot is made: (batch, seq, score_width).

        hidden: (batch, seq, hidden).
        """
        if self.score is None:
            return hidden[..., :0]
        scored: Tensor = self.score(hidden)
        return scored

    def average(
        self,
        codes: Tensor,
        scores: Tensor,
        before: tuple[Tensor, Tensor] | None = None,
        has_before: Tensor | None = None,
    ) -> Tensor:
        """Slots of whole groups: (batch, slots, code_width).

        codes, scores: (batch, slots, r, code_width or score_width), of each slot's own tokens; r
        may be smaller than the gate's group, whose first places (last, of the group before) it
        then takes.
        before: the same of the group before each slot's own (needed with overlap). has_before:
        (batch or 1, slots) bool, false where there is none; None: all have one.
        """
        group = codes.shape[2]
        own = self._average(codes, scores, None if self.ape is None else self.ape[:group])
        if self.carry is None:
            return own
        assert before is not None
        behind = None if self.ape_before is None else self.ape_before[-group:]
        earlier = self._average(*before, behind)
        share = self._widened(self.carry) if self.gate == "head" else self.carry
        if has_before is not None:
            share = torch.where(has_before[..., None], share, 0.0)
        return torch.lerp(own, earlier, share.to(own.dtype).expand_as(own))

    def _average(self, codes: Tensor, scores: Tensor, ape: Tensor | None) -> Tensor:
        if ape is None:
            return codes.mean(dim=2)
        logits = scores
        if self.expand is not None:
            logits = self._widened(scores[..., : self.heads]) + self.expand(
                scores[..., self.heads :]
            )
        logits = logits + ape
        work = torch.float32 if logits.element_size() < 4 else logits.dtype
        weights = torch.softmax(logits, dim=2, dtype=work).to(codes.dtype)
        if self.weights_width == 1:
            return torch.matmul(weights.transpose(2, 3), codes)[:, :, 0]
        if self.gate == "head":
            weights = self._widened(weights)
        return (weights * codes).sum(dim=2)

    def _widened(self, weights: Tensor) -> Tensor:
        """One value a head to one a value: (..., heads) to (..., code_width)."""
        pieces, start = [], 0
        for part in self.parts:
            piece = weights[..., start : start + part.heads]
            pieces.append(piece.repeat_interleave(part.width, dim=-1))
            start += part.heads
        return torch.cat(pieces, dim=-1)

    def slot_bias(self, layer: int) -> Tensor | None:
        """What is added to a layer's logits of slots: (query heads,), or None for nothing."""
        name = str(layer)
        return self.mass[name] if name in self.mass else None  # noqa: SIM401 (ParameterDict.get)
