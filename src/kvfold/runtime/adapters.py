"""Low-rank terms acting on a model's own projections, without changing a module or a weight.

A forward hook on each adapted projection adds the term to its output, so whatever runs the model
sees the adapted projection: the plain forward, a folded one, or a capture that is opened while the
terms act. Gradients reach the terms' weights and pass on to what is below, never the base's own
weights unless these ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from kvfold.anatomy import ProjectionName, anatomy, attention_module
from kvfold.errors import AttachError, UnsupportedModelError
from kvfold.methods import Lora, LowRank


@dataclass(frozen=True)
class AdaptedRows:
    """One projection that a term acts on: output columns of a module, from `start` on.

    The module is the model's own; where it makes several projections at once, the columns are
    those of one of them.
    """

    layer: int
    name: ProjectionName
    module: nn.Module
    start: int
    term: LowRank

    @property
    def outputs(self) -> int:
        """How many columns the module makes in all."""
        return int(self.module.out_features)  # type: ignore[arg-type]


class _AddTerm:
    """The hook that adds a term to its module's output."""

    def __init__(self, rows: AdaptedRows) -> None:
        self.term = rows.term
        stop = rows.start + rows.term.b.shape[0]
        self.around = (rows.start, rows.outputs - stop)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        added: Tensor = self.term(args[0])
        if any(self.around):
            added = functional.pad(added, self.around)
        return output + added.to(output.dtype)


def check_projections(model: Any, lora: Lora) -> tuple[AdaptedRows, ...]:
    """Where each term acts on a model.

    Raises `UnsupportedModelError` for a projection of other widths than the term was made for,
    `AttachError` where low-rank terms of an add-on act already.
    """
    family = anatomy(model).family
    found = []
    for layer, name, term in lora.terms():
        module, start = family.rows(attention_module(model, layer), name)
        rows = AdaptedRows(layer, name, module, start, term)
        _check_widths(rows)
        if any(isinstance(hook, _AddTerm) for hook in module._forward_hooks.values()):
            raise AttachError(
                f"low-rank terms act on projection {name} of layer {layer} already; detach the "
                "add-on, or leave the other `adapted` block, first"
            )
        found.append(rows)
    return tuple(found)


def _check_widths(rows: AdaptedRows) -> None:
    outputs, inputs = rows.term.b.shape[0], rows.term.a.shape[1]
    has = tuple(getattr(rows.module, f"{side}_features", None) for side in ("in", "out"))
    if has[0] != inputs or has[1] is None or rows.start + outputs > has[1]:
        raise UnsupportedModelError(
            f"projection {rows.name} of layer {rows.layer} must be a linear map with {inputs} "
            f"inputs and {outputs} outputs from column {rows.start} on, as the model's "
            f"configuration says; got {type(rows.module).__name__} with {has[0]} inputs and "
            f"{has[1]} outputs; use the model as it is published, or a plan without lora"
        )


class Adapters:
    """The terms of `lora` on a model, from now until `detach`.

    Raises what `check_projections` raises, before anything has changed.
    """

    def __init__(self, model: Any, lora: Lora) -> None:
        rows = check_projections(model, lora)
        self._handles = [one.module.register_forward_hook(_AddTerm(one)) for one in rows]

    def detach(self) -> None:
        """Give the model back as it was. Does nothing if that has happened already."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


@contextmanager
def adapted(model: Any, lora: Lora | None) -> Iterator[None]:
    """The terms act on the model inside the block, also on gradients; None changes nothing.

    They are computed in the dtype of their own weights, and what they add in the model's. Raises
    what `check_projections` raises.
    """
    adapters = None if lora is None else Adapters(model, lora)
    try:
        yield
    finally:
        if adapters is not None:
            adapters.detach()
