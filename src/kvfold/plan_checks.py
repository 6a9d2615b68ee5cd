"""Whether a plan fits a model: every rule about layers, in one place.

Each check raises `PlanError` that says which rule was broken, what came and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvfold.anatomy import Anatomy
from kvfold.errors import PlanError
from kvfold.plan_entries import Ced, Csa2, DepthEntry, Drop, Latent, LoraEntry, Pool, Turboquant


class PlanLike(Protocol):
    """What is checked of a plan."""

    @property
    def window(self) -> int:
        """Tokens kept exact."""

    @property
    def depth(self) -> tuple[DepthEntry, ...]:
        """The depth axis."""

    @property
    def sequence(self) -> tuple[Pool, ...]:
        """The sequence axis."""

    @property
    def bits(self) -> tuple[Turboquant, ...]:
        """The bits axis."""

    @property
    def prefill(self) -> str:
        """`full` or `skip`."""

    @property
    def replay(self) -> int:
        """Tokens of a skipped prompt that run through all layers."""

    @property
    def state_projector(self) -> bool:
        """Whether states of skipped linear-attention layers are predicted."""

    @property
    def lora(self) -> LoraEntry | None:
        """Low-rank terms on projections."""

    @property
    def lora_layers(self) -> tuple[int, ...]:
        """The layers that `lora` adapts."""

    @property
    def split(self) -> int | None:
        """How many layers a skipped token runs through."""

    def group_of(self, layer: int) -> int:
        """Tokens of one slot of a layer."""


def check_plan(plan: PlanLike, anatomy: Anatomy) -> None:
    """Raise `PlanError` unless the model has every layer, in the order the plan needs."""
    for entry in plan.depth:
        _check_layers(entry, anatomy)
        _check_entry(entry, anatomy)
    _check_partition(plan.depth)
    axes: dict[str, Sequence[Pool | Turboquant]] = {"sequence": plan.sequence, "bits": plan.bits}
    for axis, entries in axes.items():
        for other in entries:
            _check_layers(other, anatomy)
        _check_axis(axis, entries, plan.depth)
    _check_window(plan)
    if plan.prefill == "skip":
        _check_skip(plan, anatomy)
    if plan.state_projector:
        _check_state_projector(plan, anatomy)
    if plan.lora is not None:
        _check_lora(plan.lora, plan.lora_layers, anatomy)


def _check_lora(entry: LoraEntry, layers: tuple[int, ...], anatomy: Anatomy) -> None:
    """Each layer once, and with projections of attention."""
    if not layers:
        raise PlanError(
            "lora adapts the layers that some entry of an axis names, and the plan names none; "
            "give lora its own layers, or leave it out"
        )
    _check_exist("lora", layers, anatomy)
    attending = [n.index for n in anatomy.layers if n.kind != "linear_attention"]
    for layer in layers:
        if layer not in attending:
            raise PlanError(
                f"lora names layer {layer}, which is a linear_attention layer; only attention "
                f"layers have the projections {', '.join(entry.targets)}: {attending}"
            )
    for layer in layers:
        for target in entry.targets:
            most = min(anatomy.projection_widths(layer, target))
            if entry.rank > most:
                raise PlanError(
                    f"lora's rank must be at most {most}, the smaller width of projection "
                    f"{target} of layer {layer}; got {entry.rank}; lower it"
                )


def _check_exist(method: str, layers: Sequence[int], anatomy: Anatomy) -> None:
    for layer in layers:
        if not 0 <= layer < anatomy.num_layers:
            raise PlanError(
                f"{method} names layer {layer}, but the model has layers 0 to "
                f"{anatomy.num_layers - 1} (numbers are 0-based)"
            )
    if len(set(layers)) != len(layers):
        raise PlanError(f"{method} names a layer twice: {list(layers)}")


def _split_of(plan: PlanLike, what: str) -> int:
    if plan.split is None:
        raise PlanError(
            f"{what} needs a depth entry that draws on a hidden state (ced, or latent with a "
            "split): it says how many layers skipped tokens run through; the plan has none"
        )
    return plan.split


def _check_skip(plan: PlanLike, anatomy: Anatomy) -> None:
    """Every layer from the split on must have a history that needs no layer from the split on."""
    split = _split_of(plan, "prefill: skip")
    if split == 0:
        raise PlanError(
            "prefill: skip needs a split of at least 1, or no layer would run on skipped tokens; "
            "got split=0; raise it, or use prefill: full"
        )
    sliding = [n.index for n in anatomy.layers[split:] if n.kind == "sliding_attention"]
    if sliding:
        raise PlanError(
            f"prefill: skip needs layers from {split} on whose history can be regenerated; layers "
            f"{sliding} attend to a sliding window of exact tokens; use prefill: full"
        )
    ced = {layer for e in plan.depth if isinstance(e, Ced) for layer in e.layers}
    skippable: set[int] = set()
    for entry in plan.depth:
        if min(entry.layers) < split <= max(entry.layers):
            raise PlanError(
                f"under prefill: skip an entry must lie on one side of the split {split}; the "
                f"{entry.method} entry has layers {list(entry.layers)}; divide it, or choose "
                "another split"
            )
        is_fed = isinstance(entry, Csa2) and entry.source in ced
        if isinstance(entry, Ced | Drop) or is_fed or getattr(entry, "split", None) is not None:
            skippable.update(entry.layers)
    left = [layer for layer in anatomy.foldable_layers if layer >= split and layer not in skippable]
    if left:
        raise PlanError(
            f"under prefill: skip the history of every layer from {split} on must come from H_s, "
            f"by ced, by csa2 on a source that ced feeds, or by latent with a split; layers "
            f"{left} have another or none; add them to such an entry, or use prefill: full"
        )
    largest = max((plan.group_of(n) for n in anatomy.foldable_layers if n >= split), default=1)
    if plan.replay < plan.window + largest - 1:
        raise PlanError(
            f"replay must be at least the window's {plan.window + largest - 1} tokens, whose exact "
            f"keys and values it makes; got replay={plan.replay}; raise it, or narrow the window"
        )


def _check_state_projector(plan: PlanLike, anatomy: Anatomy) -> None:
    split = _split_of(plan, "state_projector")
    if not any(layer.kind == "linear_attention" for layer in anatomy.layers[split:]):
        raise PlanError(
            f"state_projector serves linear-attention layers from the split on; this model has "
            f"none from layer {split} on; leave it out"
        )


def _check_window(plan: PlanLike) -> None:
    if plan.window == 0 and any(isinstance(entry, Drop) for entry in plan.depth):
        raise PlanError(
            "a plan that drops the history needs a window of at least 1, or a token would not "
            "see itself; got window=0"
        )
    pooled: list[Pool | Drop] = [entry for entry in plan.depth if isinstance(entry, Drop)]
    for entry in (*plan.sequence, *pooled):
        if entry.group > plan.window:
            raise PlanError(
                f"{entry.method} with group={entry.group} needs a window of at least as many "
                "tokens, so that no token's own group is folded before the token has seen itself; "
                f"got window={plan.window}; widen the window or make the group smaller"
            )


def _check_axis(
    axis: str, entries: Sequence[Pool | Turboquant], depth: Sequence[DepthEntry]
) -> None:
    """Each layer in one entry of an axis; layers that share a code in the same one."""
    owner: dict[int, int] = {}
    for index, entry in enumerate(entries):
        for layer in entry.layers:
            if layer in owner:
                raise PlanError(
                    f"layer {layer} is in two entries of {axis}; each layer may be in one; remove "
                    "it from the other"
                )
            owner[layer] = index
    for served in depth:
        named = [layer for layer in served.layers if layer in owner]
        if isinstance(served, Drop) and named:
            raise PlanError(
                f"{axis} names layers {named}, whose history the plan drops; remove them from one"
            )
        shares = served.method not in ("identity", "drop")
        if shares and len({owner.get(layer) for layer in served.layers}) > 1:
            raise PlanError(
                f"layers {list(served.layers)} share one {served.method} code, so {axis} must "
                f"name all of them in one entry or none; it names {named}"
            )


def _check_layers(entry: DepthEntry | Pool | Turboquant, anatomy: Anatomy) -> None:
    _check_exist(entry.method, entry.layers, anatomy)
    for layer in entry.layers:
        kind = anatomy.layers[layer].kind
        if kind != "full_attention":
            raise PlanError(
                f"{entry.method} names layer {layer}, which is a {kind} layer; only "
                f"full-attention layers can be folded: {list(anatomy.foldable_layers)}"
            )


def _check_entry(entry: DepthEntry, anatomy: Anatomy) -> None:
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
