"""Bytes of a cache by component, at given lengths, beside the plain cache.

Two figures, because they differ: `stored_bytes` is what must be kept or written down (every
layer's history as its shared code), `resident_bytes` what sits in memory under the residency that
the plan picks (expanded readers keep their regenerated keys and values, so nothing is saved there).
Both include anchors, window and any recurrent state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvfold.anatomy import Anatomy
from kvfold.plan import Plan
from kvfold.runtime.ledger import Ledger, plain_bytes, predict_bytes

ELEMENT_SIZE = 2
"""Bytes a value: figures are for bfloat16, whatever dtype the measurement ran in."""


@dataclass(frozen=True)
class Memory:
    """A cache at one length, one row, in bfloat16.

    tokens: seen tokens. components: stored bytes by part. plain_bytes: of the plain cache.
    """

    tokens: int
    components: dict[str, int]
    stored_bytes: int
    resident_bytes: int
    plain_bytes: int

    @property
    def times_smaller(self) -> float:
        """How many times the stored cache fits into the plain one."""
        return self.plain_bytes / max(1, self.stored_bytes)

    @property
    def resident_times_smaller(self) -> float:
        """How many times the cache in memory fits into the plain one."""
        return self.plain_bytes / max(1, self.resident_bytes)


def memory_at(plan: Plan | None, anatomy: Anatomy, lengths: tuple[int, ...]) -> tuple[Memory, ...]:
    """The cache at each length; plan None is the plain cache."""
    return tuple(_memory(plan, anatomy, tokens) for tokens in lengths)


def _memory(plan: Plan | None, anatomy: Anatomy, tokens: int) -> Memory:
    plain = plain_bytes(anatomy, tokens, element_size=ELEMENT_SIZE)
    if plan is None:
        return Memory(tokens, _used(plain), plain.total, plain.total, plain.total)
    stored = _used(_stored(plan, anatomy, tokens))
    resident = predict_bytes(plan, anatomy, tokens, element_size=ELEMENT_SIZE)
    return Memory(tokens, stored, sum(stored.values()), resident.total, plain.total)


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
