"""The way of a token's keys and values through the three axes, and back.

At write: depth makes one code of each token, sequence averages the codes of a group of tokens into
one slot, bits quantises the slot. At read the same in reverse: the slot's code is decoded, and
each layer that reads it maps it to its own keys and values. Every step but depth may be absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvfold.methods.base import Activations, CodePart, DepthMethod, Source
from kvfold.methods.maps import rms_normalize
from kvfold.methods.pool import PoolGate
from kvfold.methods.turboquant import TurboQuant


class Bits(NamedTuple):
    """How slots are quantised: bits a value of keys and of values, and the rotation's seed."""

    key_bits: int
    value_bits: int
    seed: int

    def of(self, part: CodePart) -> int:
        """Bits of one part of a code; one that holds keys and values at once has the keys'."""
        return self.value_bits if part.kind == "values" else self.key_bits


class Pipeline(nn.Module):
    """One code's way: a depth method, then a pooling gate and quantisation if the plan has them.

    slot_position: the place of a slot among the positions of its tokens, from 0 (its first
    token's) to group - 1.
    """

    def __init__(
        self,
        depth: DepthMethod,
        sequence: PoolGate | None = None,
        bits: Bits | None = None,
        *,
        group: int = 1,
        slot_position: float = 0.0,
    ) -> None:
        super().__init__()
        self.depth = depth
        self.sequence = sequence
        self.bits = bits
        self.group = group
        self.slot_position = slot_position

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that read the slots."""
        return self.depth.layers

    @property
    def holds_all(self) -> bool:
        """Whether a code holds the keys and values of all its layers as they are."""
        return all(self.depth.holds(layer) for layer in self.layers)

    @property
    def inputs(self) -> tuple[Source, ...]:
        """What `records` needs of the model."""
        if self.sequence is None or self.sequence.score_width == 0:
            return self.depth.inputs
        return tuple(dict.fromkeys((*self.depth.inputs, self.depth.gate_source)))

    @property
    def overlap(self) -> bool:
        """Whether a slot also draws on the tokens of the slot before."""
        return self.sequence is not None and self.sequence.overlap

    @property
    def record_width(self) -> int:
        """Values kept of a token until its slot is made: its code and its scores."""
        scores = 0 if self.sequence is None else self.sequence.score_width
        return self.depth.code_width + scores

    def records(self, activations: Activations) -> Tensor:
        """Each token's code with its gate scores behind: (batch, seq, record_width)."""
        code = self.depth.encode(activations)
        if self.sequence is None or self.sequence.score_width == 0:
            return code
        scores = self.sequence.scores(self.gate_input(activations))
        return torch.cat([code, scores], dim=-1)

    def gate_input(self, activations: Activations) -> Tensor:
        """What a gate scores tokens by: (batch, seq, hidden).

        A hidden state is divided by its root mean square first, as everywhere: some of its values
        are hundreds of times larger than the others at single tokens.
        """
        hidden = activations[self.depth.gate_source]
        return rms_normalize(hidden) if self.depth.gate_source.kind == "hidden" else hidden

    def slots(self, records: Tensor, has_before: Tensor | None = None) -> Tensor:
        """Codes of slots: (batch, slots, code_width).

        records: (batch, tokens, record_width) of whole groups in order; with overlap those of the
        group before the first slot lead. has_before: (batch or 1, slots) bool, whether a slot has
        a group before it; None: all have.
        """
        if self.sequence is None:
            return records
        batch = records.shape[0]
        groups = records.view(batch, -1, self.group, records.shape[-1])
        width = self.depth.code_width
        codes, scores = groups[..., :width], groups[..., width:]
        if not self.overlap:
            return self.sequence.average(codes, scores)
        before = codes[:, :-1], scores[:, :-1]
        return self.sequence.average(codes[:, 1:], scores[:, 1:], before, has_before)

    def whole_slots(self, records: Tensor, anchors: int) -> Tensor:
        """Codes of every whole group behind the anchors: (batch, slots, code_width).

        records: (batch, seq, record_width) of rows from their first token on.
        """
        count = max(0, records.shape[1] - anchors) // self.group
        whole = records[:, anchors : anchors + self.group * count]
        if not self.overlap:
            return self.slots(whole)
        lead = torch.zeros_like(whole[:, :1]).expand(-1, self.group, -1)
        has_before = torch.arange(count, device=records.device)[None] > 0
        return self.slots(torch.cat([lead, whole], dim=1), has_before)

    def rounded_codes(self, codes: Tensor) -> Tensor:
        """Codes (batch, slots, code_width) as they come back quantised, part by part.

        As they are where the plan has no bits. Gradients pass straight through.
        """
        return codes if self.bits is None else self._by_part(codes, TurboQuant.rounded)

    def rotated(self, codes: Tensor) -> Tensor:
        """Codes, or rows of a map of codes, (..., code_width), in the basis of quantised codes.

        Inner products are the same there, so a map may be turned in place of every code. Only for
        a plan with bits.
        """
        return self._by_part(codes, TurboQuant.rotate)

    def unrotated(self, codes: Tensor) -> Tensor:
        """Undo `rotated`."""
        return self._by_part(codes, TurboQuant.unrotate)

    def codecs(self) -> Iterator[tuple[CodePart, TurboQuant]]:
        """What quantises each part of a code; none without bits."""
        if self.bits is not None:
            for part in self.depth.code_parts:
                yield part, TurboQuant(part.width, self.bits.of(part), self.bits.seed)

    def _by_part(self, codes: Tensor, change: Callable[[TurboQuant, Tensor], Tensor]) -> Tensor:
        """Every head of every part changed as a vector of its own."""
        pieces, start = [], 0
        for part, codec in self.codecs():
            stop = start + part.heads * part.width
            vectors = codes[..., start:stop].reshape(*codes.shape[:-1], part.heads, part.width)
            pieces.append(change(codec, vectors).flatten(-2))
            start = stop
        return torch.cat(pieces, dim=-1)

    def rounded_heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's slots, (batch, kv_heads, slots, head_dim) each, as they come back quantised.

        What a layer reads that keeps its own expanded slots; keys are post-norm and post-RoPE.
        Both as they are where the plan has no bits. Gradients pass straight through.
        """
        if self.bits is None:
            return keys, values
        key_codec = TurboQuant(keys.shape[-1], self.bits.key_bits, self.bits.seed)
        value_codec = TurboQuant(values.shape[-1], self.bits.value_bits, self.bits.seed)
        return key_codec.rounded(keys), value_codec.rounded(values)

    def slot_bias(self, layer: int) -> Tensor | None:
        """What is added to a layer's logits of slots: (query heads,), or None for nothing."""
        return None if self.sequence is None else self.sequence.slot_bias(layer)

    def parameter_count(self) -> int:
        """How many trained values the pipeline has."""
        return sum(parameter.numel() for parameter in self.parameters())


def depth_methods(pipelines: nn.ModuleList) -> Iterator[DepthMethod]:
    """The depth method of each pipeline."""
    for pipeline in pipelines:
        assert isinstance(pipeline, Pipeline)
        yield pipeline.depth
