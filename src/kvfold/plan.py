"""A plan says what is folded and how, apart from any weights.

It is data only: validated, frozen, written and read as YAML or JSON. `Plan.check(anatomy)` says
whether a model has what the plan names. The entries of each axis are in `plan_entries`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from kvfold.anatomy import Anatomy
from kvfold.errors import PlanError
from kvfold.plan_checks import check_plan
from kvfold.plan_entries import (
    Ced,
    Count,
    Csa2,
    DepthEntry,
    Drop,
    Frozen,
    Identity,
    Latent,
    LoraEntry,
    Pool,
    Turboquant,
)

__all__ = [
    "Ced",
    "Csa2",
    "DepthEntry",
    "Drop",
    "Identity",
    "Latent",
    "LoraEntry",
    "Plan",
    "Pool",
    "Turboquant",
]

Prefill = Literal["full", "skip"]
PrefillAttention = Literal["exact", "folded"]
Resident = Literal["auto", "expanded", "shared", "absorbed"]


class Plan(Frozen):
    """What is kept of every token, for every layer.

    anchors: the first real tokens of a row, kept exact. window: the last tokens, kept exact.
    prefill_attention: what a prompt's own queries see (`exact`: everything; `folded`: what a
    decode step at their place would see). resident: how regenerated K and V are held in memory.
    depth: which layers' history comes from where. sequence: which layers' tokens are pooled into
    slots. bits: which layers' slots are quantised. A layer that an axis does not name is left as
    it is on that axis.

    prefill: whether a prompt runs through all layers (`full`), or only its last `replay` tokens
    and the anchors run through those from `split` on (`skip`; the others leave their history
    there, which the depth axis makes of earlier layers). state_projector: start the recurrent
    states of upper linear-attention layers from what is predicted of the skipped tokens, instead
    of from nothing.

    lora: low-rank terms on projections of attention layers, trained with the rest of the add-on
    and acting whenever it is attached; None for none.
    """

    version: Literal[1] = 1
    anchors: Count = 4
    window: Count = 128
    prefill_attention: PrefillAttention = "folded"
    resident: Resident = "auto"
    depth: tuple[DepthEntry, ...] = ()
    sequence: tuple[Pool, ...] = ()
    bits: tuple[Turboquant, ...] = ()
    prefill: Prefill = "full"
    replay: Annotated[Count, Field(ge=1)] = 256
    state_projector: bool = False
    lora: LoraEntry | None = None

    @field_validator("depth", "sequence", "bits", mode="before")
    @classmethod
    def _axis_is_a_list(cls, value: Any) -> Any:
        if value is None:
            return ()
        if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
            raise ValueError("an axis must be a list of entries, each with its method")
        return tuple(value)

    @property
    def folded_layers(self) -> tuple[int, ...]:
        """Every layer that some entry of some axis names, in order."""
        entries = (*self.depth, *self.sequence, *self.bits)
        return tuple(sorted({layer for entry in entries for layer in entry.layers}))

    @property
    def lora_layers(self) -> tuple[int, ...]:
        """The layers that `lora` adapts, in order; none without it."""
        if self.lora is None:
            return ()
        named = self.folded_layers if self.lora.layers is None else self.lora.layers
        return tuple(sorted(named))

    @property
    def split(self) -> int | None:
        """How many layers a skipped token runs through: the highest split of the depth axis.

        None where no entry draws on a hidden state.
        """
        splits = [
            e.split for e in self.depth if isinstance(e, Ced | Latent) and e.split is not None
        ]
        return max(splits, default=None)

    def group_of(self, layer: int) -> int:
        """Tokens that become one slot of a layer: 1 where nothing pools them."""
        for entry in self.sequence:
            if layer in entry.layers:
                return entry.group
        for served in self.depth:
            if isinstance(served, Drop) and layer in served.layers:
                return served.group
        return 1

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, defaults included, but for a `lora` that is not there."""
        return self.model_dump(mode="json", exclude={"lora"} if self.lora is None else None)

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
            raise PlanError(explain(error)) from None

    @classmethod
    def from_yaml(cls, text: str) -> Plan:
        """Read a plan from YAML or JSON text; raises `PlanError`."""
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"a plan must be valid YAML or JSON: {error}") from None
        return cls.from_dict(data)

    from_json = from_yaml

    @classmethod
    def for_budget(
        cls,
        anatomy: Anatomy,
        *,
        bytes_per_token: float | None = None,
        times_smaller: float | None = None,
    ) -> Plan:
        """The best plan known for a model whose history costs at most the budget.

        Exactly one of bytes_per_token (stored bytes of one token of history over all
        full-attention layers, in 16 bits, scales included) and times_smaller (how many times less
        than the plain cache's history that is). The choice follows `kvfold.budget.LADDERS`;
        `kvfold.describe.describe(plan, anatomy)` says in words what it is. Raises `PlanError` for
        a budget that can't be met or makes no sense, saying which can.
        """
        from kvfold.budget import plan_for_budget

        return plan_for_budget(
            anatomy, bytes_per_token=bytes_per_token, times_smaller=times_smaller
        )

    def replace(self, **changes: Any) -> Plan:
        """A copy with some keys changed, validated anew."""
        return Plan.from_dict({**self.to_dict(), **changes})

    def without_history(self) -> Plan:
        """The same exact tokens of the same layers, the history dropped: recovery's yardstick.

        It has no LoRA, so that what the history is worth does not depend on what was trained.
        """
        groups: dict[int, list[int]] = {}
        for layer in self.folded_layers:
            groups.setdefault(self.group_of(layer), []).append(layer)
        drops = [
            {"method": "drop", "layers": layers, "group": group} for group, layers in groups.items()
        ]
        window = max(1, self.window)
        kept = {"window": window, "resident": "auto", "prefill": "full", "state_projector": False}
        return self.replace(depth=drops, sequence=(), bits=(), lora=None, **kept)

    def check(self, anatomy: Anatomy) -> None:
        """Raise `PlanError` unless the model has every layer, in the order the plan needs."""
        check_plan(self, anatomy)


def explain(error: ValidationError, what: str = "plan") -> str:
    """What is wrong with plain data that should be a plan, or something else, key by key."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or what
        told = item["type"] == "missing" or "; got " in item["msg"]
        received = "" if told else f"; got {item['input']!r}"
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {where}{received}; remove it or correct its spelling")
        else:
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{received}")
    return f"the {what} is not valid: " + "; ".join(lines)
