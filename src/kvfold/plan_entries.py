"""The entries of a plan: one frozen class per method of each axis.

An entry says which layers a method serves and with which settings. Layer numbers are 0-based
indices into the model's layers; `split` counts layers: H_s is the output of the first s of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from kvfold.anatomy import ProjectionName

Layers = Annotated[tuple[StrictInt, ...], Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=0, le=2**24)]
"""A number of tokens or layers; bounded, so that a slip of the hand can't ask for terabytes."""


class Frozen(BaseModel):
    """Immutable, and unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


Group = Annotated[StrictInt, Field(ge=1, le=64)]
"""Tokens that become one slot."""


class Identity(Frozen):
    """Every layer keeps its own keys and values: the exact no-op."""

    method: Literal["identity"] = "identity"
    layers: Layers


class Drop(Frozen):
    """Nothing is kept of the history: only anchors and window (the lower yardstick).

    group: tokens leave the window so many at a time, as they do under a pool of that group.
    """

    method: Literal["drop"] = "drop"
    layers: Layers
    group: Group = 1


class Ced(Frozen):
    """History K and V of `layers` regenerated from H_split, the output of the first layers.

    `normalize` divides H_split by its root mean square first.
    """

    method: Literal["ced"] = "ced"
    split: Count
    layers: Layers
    bias: bool = True
    normalize: bool = True


class Csa2(Frozen):
    """History K and V of `readers` regenerated from the stored K and V of `source`.

    `form="joint"` maps each of K and V from [K; V]; `"separate"` maps K from K and V from V (the
    card's). `residual_hidden` adds a residual MLP of that hidden width to each map, 0 none.
    `value_source` takes V from another layer than K. If a `ced` entry of the same plan serves
    `source`, the stored K and V are the ones that it regenerates.
    """

    method: Literal["csa2"] = "csa2"
    source: Count
    readers: Layers
    form: Literal["joint", "separate"] = "joint"
    bias: bool = True
    residual_hidden: Count = 0
    value_source: Count | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers whose history this entry serves, its sources included."""
        sources = {self.source}
        if self.value_source is not None:
            sources.add(self.value_source)
        return tuple(sorted(sources | set(self.readers)))

    @model_validator(mode="after")
    def _sources_do_not_read(self) -> Csa2:
        for layer in {self.source, self.value_source} & set(self.readers):
            raise ValueError(f"layer {layer} can't be source and reader at once")
        if len(set(self.readers)) != len(self.readers):
            raise ValueError(f"readers name a layer twice: {list(self.readers)}")
        return self


class Latent(Frozen):
    """One code of `rank` values a token for a whole group of layers.

    The code is linear in the group's own stacked [K; V], or in H_split if `split` is given.
    `value_rank` gives values a code of their own of that rank, and `rank` is then the keys'.
    """

    method: Literal["latent"] = "latent"
    layers: Layers
    rank: StrictInt = Field(ge=1)
    value_rank: StrictInt | None = Field(default=None, ge=1)
    split: Count | None = None


DepthEntry = Annotated[Identity | Drop | Ced | Csa2 | Latent, Field(discriminator="method")]


class Pool(Frozen):
    """`group` consecutive tokens of the history become one slot, a learned weighted average.

    gate: what weighs the tokens: `token`, one score a token (the second card's form); `head`, one
    a kv head, for keys and values apart; `channel`, one a channel: its head's and a part of its
    own through `gate_rank` values; `mean`, none: all alike. overlap: a slot may also draw on the
    group before its own. mass_bias: logits of slots get a learned bias per query head, since a
    slot stands for several tokens. position: which of its tokens' positions a slot takes.
    """

    method: Literal["pool"] = "pool"
    layers: Layers
    group: Group = 4
    gate: Literal["mean", "token", "head", "channel"] = "token"
    gate_rank: Annotated[StrictInt, Field(ge=1, le=2**16)] = 32
    overlap: bool = False
    mass_bias: bool = True
    position: Literal["mean", "first", "last"] = "mean"


class Turboquant(Frozen):
    """Slots of `layers` are stored in so many bits a value (1 to 8), keys and values apart.

    seed: of the rotation. Where one code serves keys and values at once it has `key_bits`.
    """

    method: Literal["turboquant"] = "turboquant"
    layers: Layers
    key_bits: Annotated[StrictInt, Field(ge=1, le=8)] = 8
    value_bits: Annotated[StrictInt, Field(ge=1, le=8)] = 4
    seed: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 0


class LoraEntry(Frozen):
    """Low-rank terms on projections of attention layers: `W x + (alpha / rank) * B A x`.

    rank: rows of A. alpha: twice the rank where none is given, so that what is added has the same
    size for every rank. targets: which projections: of queries, keys, values and outputs. `q` is
    also the output gate where one projection makes both. layers: every layer that an entry of
    an axis names where none are given.
    """

    rank: Annotated[StrictInt, Field(ge=1, le=2**16)]
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    targets: Annotated[tuple[ProjectionName, ...], Field(min_length=1)] = ("q", "o")
    layers: Layers | None = None

    @property
    def scale(self) -> float:
        """What `B A x` is multiplied by."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    @model_validator(mode="after")
    def _targets_are_distinct(self) -> LoraEntry:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"targets name a projection twice: {list(self.targets)}")
        return self
