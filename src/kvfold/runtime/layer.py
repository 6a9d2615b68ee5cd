"""One folded layer of an attached model: its attention module, its method, how it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.anatomy import Anatomy, Family, LayerAnatomy, attention_module, k_norm_weight
from kvfold.methods import AffineMap, DepthMethod, Pipeline
from kvfold.runtime.schedule import Schedule, Step

Reading = Literal["expanded", "shared", "absorbed", "dropped"]


class Rotation(NamedTuple):
    """RoPE at some positions: `x * cos + swap(x) * sin`, swap exchanging a head's two halves.

    cos, sin: (rows, 1, seq, rotary_dim); the first half of `sin` is negative, which spares the
    negation and the concatenation of the usual form.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Rotation:
        """From cosines and sines (rows, seq, rotary_dim) as the model makes them."""
        first, second = sin.chunk(2, dim=-1)
        return cls(cos[:, None], torch.cat([-first, second], dim=-1)[:, None])

    def turn(self, x: Tensor) -> Tensor:
        """The first rotary_dim values of each head of x (batch, heads, seq, head_dim), turned."""
        width = self.cos.shape[-1]
        if width == x.shape[-1]:
            return torch.addcmul(x * self.cos, x.roll(width // 2, -1), self.sin)
        part = x[..., :width]
        turned = torch.addcmul(part * self.cos, part.roll(width // 2, -1), self.sin)
        return torch.cat([turned, x[..., width:]], dim=-1)


@dataclass(frozen=True)
class SlotPlaces:
    """Where the slots of one step lie: those it made, or those that became visible in it.

    place: which position among its own tokens a slot takes.
    """

    step: Step
    made: bool
    place: float

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal positions within a step."""
        return id(self.step), self.made, self.place

    def positions(self) -> Tensor:
        """(rows, most slots), fractional where the place is."""
        step = self.step
        return step.slot_positions(step.completed if self.made else step.exits, self.place)


@dataclass(frozen=True)
class StoredSlots:
    """Stored slots in order, the same in every row: numbers `slots` of a schedule's.

    place: which position among its own tokens a slot takes.
    """

    schedule: Schedule
    slots: range
    place: float
    device: torch.device

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal positions within a step."""
        return self.schedule.group, self.slots, self.place

    def positions(self) -> Tensor:
        """(1, slots), fractional where the place is."""
        numbers = torch.arange(self.slots.start, self.slots.stop, device=self.device)
        first = self.schedule.anchors + (
            int(self.place) if self.place == int(self.place) else self.place
        )
        return (self.schedule.group * numbers + first)[None]


RotaryAt = Callable[[SlotPlaces | StoredSlots], Rotation]
"""The rotation at the positions of some slots."""


@dataclass(frozen=True)
class NewTokens:
    """A step's own queries, keys and values, post-norm and post-RoPE.

    queries: (batch, heads, new, head_dim); keys, values: (batch, kv_heads, new, head_dim).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class FoldedAttention:
    """A layer's static parts. The module is the model's own; only its forward is replaced."""

    index: int
    module: Any
    family: Family
    anatomy: LayerAnatomy
    pipeline: Pipeline
    reading: Reading

    @property
    def method(self) -> DepthMethod:
        """The depth method that decodes this layer's slots."""
        return self.pipeline.depth

    @property
    def expands_early(self) -> bool:
        """Whether a slot is written when it is made, not only when it becomes visible.

        So it is wherever what is written takes no more memory than the code would while it waits.
        """
        expanded_more = self.pipeline.bits is None and not self.pipeline.holds_all
        return self.reading != "expanded" or not expanded_more

    @property
    def scaling(self) -> float:
        """What logits are multiplied by."""
        return float(self.module.scaling)

    def heads(self, flat: Tensor) -> Tensor:
        """(batch, seq, kv_width) to (batch, kv_heads, seq, head_dim)."""
        return flat.view(*flat.shape[:2], -1, self.anatomy.head_dim).transpose(1, 2)

    def finish_keys(self, keys: Tensor, rotation: Rotation) -> Tensor:
        """k_norm and RoPE: keys (batch, kv_heads, seq, head_dim), pre-norm, pre-RoPE."""
        if self.anatomy.k_norm != "none":
            keys = self.module.k_norm(keys)
        return rotation.turn(keys) if self.anatomy.rotary_dim else keys

    def finish_queries(self, queries: Tensor, rotation: Rotation) -> Tensor:
        """q_norm and RoPE: queries (batch, heads, seq, head_dim)."""
        if self.anatomy.k_norm != "none":
            queries = self.module.q_norm(queries)
        return rotation.turn(queries) if self.anatomy.rotary_dim else queries

    def slot_bias(self) -> Tensor | None:
        """What is added to logits of slots: (query heads,), or None."""
        return self.pipeline.slot_bias(self.index)

    def unfold(self, codes: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Attention-ready keys and values of codes (batch, 1, slots, code_width)."""
        keys, values = self.method.decode(self.index, codes[:, 0])
        return self.finish_keys(self.heads(keys), rotation), self.heads(values)

    def absorbs_keys(self) -> bool:
        """Whether logits are computed against codes for the non-rotary part of the keys."""
        return (
            self.reading == "absorbed"
            and self.anatomy.rotary_dim < self.anatomy.head_dim
            and self.method.affine_keys(self.index) is not None
        )

    def head_map(self, affine: AffineMap) -> AffineMap:
        """An affine map with its outputs split by kv head: weight (kv_heads, head_dim, code)."""
        d = self.anatomy.head_dim
        return AffineMap(
            affine.weight.view(-1, d, affine.weight.shape[-1]), affine.bias.view(-1, d)
        )

    def key_scales(self, keys: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """rho and Gamma of the k_norm: 1 / rms of each key, (batch, kv_heads, seq, 1), and the
        norm's weight, (head_dim,); both None without a k_norm.
        """
        found = k_norm_weight(self.family, self.module)
        if found is None:
            return None, None
        weight, epsilon = found
        work = keys.float() if keys.element_size() < 4 else keys
        rho = torch.rsqrt(work.pow(2).mean(-1, keepdim=True) + epsilon).to(keys.dtype)
        return rho, weight


def folded_layers(
    model: Any,
    shape: Anatomy,
    pipelines: Iterable[Pipeline],
    readings: Mapping[int, Reading] | None = None,
) -> list[FoldedAttention]:
    """The layers that some pipelines serve, in the pipelines' order.

    readings: of each layer; all are expanded if None.
    """
    return [
        FoldedAttention(
            layer,
            attention_module(model, layer),
            shape.family,
            shape.layers[layer],
            pipeline,
            "expanded" if readings is None else readings[layer],
        )
        for pipeline in pipelines
        for layer in pipeline.layers
    ]
