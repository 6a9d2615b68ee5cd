"""Which weights of a pipeline belong to which part of it: what a training may be told to move.

maps: the linear maps of the depth axis, encoders and decoders. residual: the MLPs on top of them.
gates: what weighs the tokens of a slot. biases: what is added to logits of slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, get_args

from torch import nn

from kvfold.errors import FitError
from kvfold.methods import Pipeline
from kvfold.methods.maps import residual_modules

Part = Literal["maps", "residual", "gates", "biases"]
PARTS: tuple[Part, ...] = get_args(Part)


def check_parts(parts: Collection[str]) -> None:
    """Raise `FitError` unless every name is a part, and there is one."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise FitError(
            f"parts must be some of {', '.join(PARTS)}; got {list(parts)}; leave them out for all"
        )


def parameters_of(pipeline: Pipeline, parts: Collection[str]) -> dict[str, nn.Parameter]:
    """A pipeline's weights that belong to some parts, by name."""
    residual = {
        id(weight) for mlp in residual_modules(pipeline).values() for weight in mlp.parameters()
    }

    def part_of(name: str, weight: nn.Parameter) -> Part:
        if name.startswith("depth."):
            return "residual" if id(weight) in residual else "maps"
        return "biases" if name.startswith("sequence.mass.") else "gates"

    named = pipeline.named_parameters()
    return {name: weight for name, weight in named if part_of(name, weight) in parts}


def units(pipelines: Sequence[Pipeline], parts: Collection[str]) -> list[list[Pipeline]]:
    """Pipelines with weights in some parts, those that share a weight together.

    CED maps of several layers can feed several csa2 groups; all other pipelines stand alone.
    """
    made: list[tuple[list[Pipeline], set[int]]] = []
    for pipeline in pipelines:
        own = {id(weight) for weight in parameters_of(pipeline, parts).values()}
        if not own:
            continue
        sharing = [unit for unit in made if unit[1] & own]
        made = [unit for unit in made if not unit[1] & own]
        members = [member for unit in sharing for member in unit[0]]
        made.append(([*members, pipeline], own.union(*(unit[1] for unit in sharing))))
    return [members for members, _ in made]
