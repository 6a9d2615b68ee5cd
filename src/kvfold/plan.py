"""A plan says what is folded and how, apart from any weights.

It is data only: validated, frozen, written and read as YAML or JSON. `Plan.check(anatomy)` says
whether a model has what the plan names. Layer numbers are 0-based indices into the model's
layers; `split` counts layers: H_s is the output of the first s of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from kvfold.anatomy import Anatomy
from kvfold.errors import PlanError

PrefillAttention = Literal["exact", "folded"]
Resident = Literal["auto", "expanded", "shared", "absorbed"]
Layers = Annotated[tuple[StrictInt, ...], Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=0, le=2**24)]
"""A number of tokens or layers; bounded, so that a slip of the hand can't ask for terabytes."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Identity(_Frozen):
    """Every layer keeps its own keys and values: the exact no-op."""

    method: Literal["identity"] = "identity"
    layers: Layers


class Drop(_Frozen):
    """Nothing is kept of the history: only anchors and window (the lower yardstick)."""

    method: Literal["drop"] = "drop"
    layers: Layers


class Ced(_Frozen):
    """History K and V of `layers` regenerated from H_split, the output of the first layers.

    `normalize` divides H_split by its root mean square first.
    """

    method: Literal["ced"] = "ced"
    split: Count
    layers: Layers
    bias: bool = True
    normalize: bool = True


class Csa2(_Frozen):
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


class Latent(_Frozen):
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


class Plan(_Frozen):
    """What is kept of every token, for every layer.

    anchors: the first real tokens of a row, kept exact. window: the last tokens, kept exact.
    prefill_attention: what a prompt's own queries see (`exact`: everything; `folded`: what a
    decode step at their place would see). resident: how regenerated K and V are held in memory.
    depth: which layers' history comes from where; layers that no entry names are left as they
    are. sequence, bits and prefill hold the place of the other axes.
    """

    version: Literal[1] = 1
    anchors: Count = 4
    window: Count = 128
    prefill_attention: PrefillAttention = "folded"
    resident: Resident = "auto"
    depth: tuple[DepthEntry, ...] = ()
    sequence: None = None
    bits: None = None
    prefill: Literal["full"] = "full"

    @field_validator("depth", mode="before")
    @classmethod
    def _depth_is_a_list(cls, value: Any) -> Any:
        if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
            raise ValueError("depth must be a list of entries, each with its method")
        return tuple(value)

    @property
    def folded_layers(self) -> tuple[int, ...]:
        """Every layer that some entry names, in order."""
        return tuple(sorted({layer for entry in self.depth for layer in entry.layers}))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, defaults included."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_yaml(self) -> str:
        """The plan as YAML text."""
        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False)
        return text

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Read a plan from plain data; raises `PlanError` that names the key at fault."""
        if not isinstance(data, dict):
            raise PlanError(f"a plan must be a mapping of keys; got {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise PlanError(_explain(error)) from None

    @classmethod
    def from_yaml(cls, text: str) -> Plan:
        """Read a plan from YAML or JSON text; raises `PlanError`."""
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"a plan must be valid YAML or JSON: {error}") from None
        return cls.from_dict(data)

    from_json = from_yaml

    def replace(self, **changes: Any) -> Plan:
        """A copy with some keys changed, validated anew."""
        return Plan.from_dict({**self.to_dict(), **changes})

    def without_history(self) -> Plan:
        """The same anchors, window and layers with the history dropped: recovery's yardstick."""
        drop = {"method": "drop", "layers": list(self.folded_layers)}
        return self.replace(depth=[drop], window=max(1, self.window), resident="auto")

    def check(self, anatomy: Anatomy) -> None:
        """Raise `PlanError` unless the model has every layer, in the order the plan needs."""
        for entry in self.depth:
            _check_entry(entry, anatomy)
        _check_partition(self.depth)
        if self.window == 0:
            for entry in self.depth:
                if isinstance(entry, Drop):
                    raise PlanError(
                        "a plan that drops the history needs a window of at least 1, or a token "
                        "would not see itself; got window=0"
                    )


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "plan"
        received = "" if item["type"] == "missing" else f"; got {item['input']!r}"
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {where}{received}; remove it or correct its spelling")
        else:
            lines.append(f"{where}: {item['msg']}{received}")
    return "the plan is not valid: " + "; ".join(lines)


def _check_entry(entry: DepthEntry, anatomy: Anatomy) -> None:
    for layer in entry.layers:
        if not 0 <= layer < anatomy.num_layers:
            raise PlanError(
                f"{entry.method} names layer {layer}, but the model has layers 0 to "
                f"{anatomy.num_layers - 1} (numbers are 0-based)"
            )
        kind = anatomy.layers[layer].kind
        if kind != "full_attention":
            raise PlanError(
                f"{entry.method} names layer {layer}, which is a {kind} layer; only "
                f"full-attention layers can be folded: {list(anatomy.foldable_layers)}"
            )
    if len(set(entry.layers)) != len(entry.layers):
        raise PlanError(f"{entry.method} names a layer twice: {list(entry.layers)}")
    if len({anatomy.layers[layer].kv_width for layer in entry.layers}) > 1:
        raise PlanError(
            f"layers of one {entry.method} entry must have keys of one width; got "
            f"{ {layer: anatomy.layers[layer].kv_width for layer in entry.layers} }"
        )
    split = getattr(entry, "split", None)
    if split is not None and split > min(entry.layers):
        raise PlanError(
            f"{entry.method} with split={split} can only serve layers from {split} on, since "
            f"H_{split} is the output of the first {split} layers; got layer {min(entry.layers)}"
        )
    if isinstance(entry, Csa2) and min(entry.readers) < max(
        entry.source, entry.value_source if entry.value_source is not None else 0
    ):
        raise PlanError(
            f"csa2 readers must come after their source {entry.source}; got {list(entry.readers)}"
        )
    if isinstance(entry, Latent):
        _check_rank(entry, anatomy)


def _check_rank(entry: Latent, anatomy: Anatomy) -> None:
    width = sum(anatomy.layers[layer].kv_width for layer in entry.layers)
    both = entry.value_rank is None
    if entry.split is not None:
        most = min(anatomy.hidden_size, 2 * width if both else width)
    else:
        most = 2 * width if both else width
    for name, rank in (("rank", entry.rank), ("value_rank", entry.value_rank)):
        if rank is not None and rank > most:
            raise PlanError(
                f"latent {name} must be at most {most}, the number of values that its input and "
                f"layers have; got {rank}; lower it"
            )


def _check_partition(depth: tuple[DepthEntry, ...]) -> None:
    """Each layer's history comes from one place; ced may feed csa2 sources, and then only those."""
    sources = {
        layer
        for entry in depth
        if isinstance(entry, Csa2)
        for layer in set(entry.layers) - set(entry.readers)
    }
    feeding = {i for i, e in enumerate(depth) if isinstance(e, Ced) and sources & set(e.layers)}
    served = [layer for index in sorted(feeding) for layer in depth[index].layers]
    if len(set(served)) != len(served):
        raise PlanError(
            f"each csa2 source may be fed by one ced entry; got {served} from several; keep one"
        )
    for index in feeding:
        _check_feeding(set(depth[index].layers), sources, depth)
    owner: dict[int, str] = {}
    for index, entry in enumerate(depth):
        for layer in entry.layers if index not in feeding else ():
            if layer in owner:
                raise PlanError(
                    f"layer {layer} is in two entries ({owner[layer]} and {entry.method}); each "
                    "layer's history must come from one place"
                )
            owner[layer] = entry.method


def _check_feeding(served: set[int], sources: set[int], depth: tuple[DepthEntry, ...]) -> None:
    """A ced entry that feeds a csa2 source serves sources only, and all of that csa2's."""
    if served - sources:
        raise PlanError(
            f"a ced entry that feeds a csa2 source must serve csa2 sources only; layers "
            f"{sorted(served - sources)} are none; put them in an entry of their own"
        )
    for entry in depth:
        own = set(entry.layers) - set(entry.readers) if isinstance(entry, Csa2) else set()
        if own & served and own - served:
            raise PlanError(
                f"a ced entry that feeds a csa2 source must serve all of its sources "
                f"{sorted(own)}; got {sorted(served)}"
            )
