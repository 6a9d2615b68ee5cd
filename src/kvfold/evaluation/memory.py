"""Bytes of a cache by component, at given lengths, beside the plain cache.

Two figures, because they differ: `stored_bytes` is what must be kept or written down (every
layer's history as its shared code), `resident_bytes` what sits in memory under the residency that
the plan picks (expanded readers keep their regenerated keys and values, so nothing is saved there).
Both include anchors, window and any recurrent state. The add-on's weights are no part of a cache,
whose cost grows with rows and tokens; they are given beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from kvfold.anatomy import Anatomy
from kvfold.methods import build_lora, build_pipelines, build_state_projector
from kvfold.plan import Plan
from kvfold.runtime.ledger import Ledger, plain_bytes, predict_bytes

ELEMENT_SIZE = 2
"""Bytes a value: figures are for bfloat16, whatever dtype the measurement ran in."""


@dataclass(frozen=True)
class Memory:
    """A cache at one length, one row, in bfloat16.

    tokens: seen tokens. components: stored bytes by part. plain_bytes: of the plain cache.
    addon_bytes: of the add-on's weights, in no other figure.
    """

    tokens: int
    components: dict[str, int]
    stored_bytes: int
    resident_bytes: int
    plain_bytes: int
    addon_bytes: int = 0

    @property
    def times_smaller(self) -> float:
        """How many times the stored cache fits into the plain one."""
        return self.plain_bytes / max(1, self.stored_bytes)

    @property
    def resident_times_smaller(self) -> float:
        """How many times the cache in memory fits into the plain one."""
        return self.plain_bytes / max(1, self.resident_bytes)

    @property
    def kept_fraction(self) -> float:
        """Stored bytes as a fraction of the plain cache's, recurrent state in both."""
        return self.stored_bytes / max(1, self.plain_bytes)

    @property
    def bits_per_value(self) -> float:
        """Bits stored for each key or value that the plain cache holds (16 there).

        Only the attention cache counts, so recurrent state is in neither.
        """
        return self._bits(self.stored_bytes)

    @property
    def resident_bits_per_value(self) -> float:
        """`bits_per_value` of the cache in memory."""
        return self._bits(self.resident_bytes)

    def _bits(self, total: int) -> float:
        recurrent = self.components.get("recurrent", 0)
        plain = self.plain_bytes - recurrent
        return 8 * ELEMENT_SIZE * (total - recurrent) / plain if plain else 0.0

    def derived(self) -> dict[str, float]:
        """The figures that follow from the others, by name."""
        names = (
            "times_smaller",
            "resident_times_smaller",
            "kept_fraction",
            "bits_per_value",
            "resident_bits_per_value",
        )
        return {name: getattr(self, name) for name in names}


def memory_at(plan: Plan | None, anatomy: Anatomy, lengths: tuple[int, ...]) -> tuple[Memory, ...]:
    """The cache at each length; plan None is the plain cache."""
    weights = 0 if plan is None else addon_bytes(plan, anatomy)
    return tuple(_memory(plan, anatomy, tokens, weights) for tokens in lengths)


def addon_bytes(plan: Plan, anatomy: Anatomy) -> int:
    """Bytes of the weights that an add-on of this plan has, in bfloat16."""
    with torch.device("meta"):
        builders = (build_pipelines, build_state_projector, build_lora)
        parts: list[nn.Module | None] = [build(plan, anatomy) for build in builders]
    weights = (weight for part in parts if part is not None for weight in part.parameters())
    return ELEMENT_SIZE * sum(weight.numel() for weight in weights)


def _memory(plan: Plan | None, anatomy: Anatomy, tokens: int, weights: int) -> Memory:
    plain = plain_bytes(anatomy, tokens, element_size=ELEMENT_SIZE)
    if plan is None:
        return Memory(tokens, _used(plain), plain.total, plain.total, plain.total)
    stored = _used(_stored(plan, anatomy, tokens))
    resident = predict_bytes(plan, anatomy, tokens, element_size=ELEMENT_SIZE)
    return Memory(
        tokens, stored, sum(stored.values()), resident.total, plain.total, addon_bytes=weights
    )


def _used(ledger: Ledger) -> dict[str, int]:
    """The components without the room that buffers have grown ahead."""
    return {name: count for name, count in ledger.components.items() if name != "unused"}


def _stored(plan: Plan, anatomy: Anatomy, tokens: int) -> Ledger:
    """The cache with nothing but codes for its history.

    A rotary embedding whose frequencies change can't read such a cache in place, but what would
    be stored is the same.
    """
    as_codes = plan.replace(resident="shared")
    static = replace(anatomy, rope_type="default")
    return predict_bytes(as_codes, static, tokens, element_size=ELEMENT_SIZE)


def history_bytes_per_token(plan: Plan, anatomy: Anatomy, *, span: int = 4096) -> float:
    """Stored bytes that one more token of history costs, in bfloat16, over all layers."""
    near = plan.anchors + plan.window + span
    low, high = (sum(_used(_stored(plan, anatomy, n)).values()) for n in (near, near + span))
    return (high - low) / span
