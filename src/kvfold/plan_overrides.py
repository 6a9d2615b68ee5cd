"""What may differ between the plan that weights were trained for and the one they run under."""

from __future__ import annotations

from typing import Any

from kvfold.errors import PlanError
from kvfold.plan import Plan


def check_override(own: Plan, other: Plan) -> None:
    """Raise `PlanError` unless weights that were trained for one plan can run under another.

    Depth entries and low-rank terms must be the same, and so must pooling, but for its group: a
    gate knows the places of a slot's tokens up to the group that it was made for, and a smaller
    one takes the first of them.
    """
    allowed = (
        "anchors, window, bits, prefill_attention, prefill, replay, state_projector, resident, and "
        "the group of pooling to a smaller one"
    )
    for axis in ("depth", "sequence"):
        ours, theirs = own.to_dict()[axis], other.to_dict()[axis]
        if [_without_group(e) for e in ours] != [_without_group(e) for e in theirs] or any(
            a.get("group", 1) < b.get("group", 1) for a, b in zip(ours, theirs, strict=True)
        ):
            raise PlanError(
                f"the plan must have the add-on's own {axis} entries, which its weights were "
                f"fitted for: {ours}; got {theirs}; change only {allowed}"
            )
    if own.lora != other.lora:
        raise PlanError(
            "the plan must have the add-on's own lora, which its weights were trained for: "
            f"{own.lora!r}; got {other.lora!r}; leave it as it is"
        )


def regrouped(plan: Plan, group: int) -> Plan:
    """The plan with every pooling of more tokens a slot at `group` tokens a slot."""
    entries = plan.to_dict()["sequence"]
    return plan.replace(sequence=[{**e, "group": min(group, e["group"])} for e in entries])


def _without_group(entry: dict[str, Any]) -> dict[str, Any]:
    pools = entry["method"] == "pool"
    return {key: value for key, value in entry.items() if not (pools and key == "group")}
