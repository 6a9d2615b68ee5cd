"""What a recipe takes, stage by stage, before it is run: peak memory, operations and time.

From the configuration alone: no weights, no text and no GPU are needed. Each stage's own code runs
on tensors without data (`kvfold.fitting.dry_stages`), and what it holds and computes is counted
(`kvfold.fitting.live_memory`).

Memory is that of tensors, the model's weights included. A process needs some more beside them:
libraries, what kernels use while they run, and gaps between tensors; `BESIDE` sets that aside.

Not counted: the measuring between stages, which keeps nothing for a backward pass, and text that
the model writes. Linear attention is counted as its reference implementation in transformers; the
kernels of flash-linear-attention are quicker and take less.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from kvfold.anatomy import anatomy
from kvfold.errors import FitError, KvfoldError, MemoryLimitError, RecipeError
from kvfold.fitting.components_of_memory import ADDON
from kvfold.fitting.dry_stages import (
    DryStage,
    DryText,
    dry_closed_form,
    dry_distil,
    dry_gates,
    dry_refine,
)
from kvfold.fitting.dry_world import Place, dry_world, meta_model
from kvfold.fitting.live_memory import BASE, LiveMemory, Work
from kvfold.fitting.machine import Machine
from kvfold.fitting.recipe import Recipe, StageEntry
from kvfold.fitting.recipe_checks import check_stages
from kvfold.fitting.sizes import shown_bytes
from kvfold.plan import Plan
from kvfold.store.addon import AddOn

DRY: Mapping[str, DryStage] = MappingProxyType(
    {
        "closed-form": dry_closed_form,
        "gates": dry_gates,
        "refine": dry_refine,
        "distil": dry_distil,
    }
)
"""How the stages of `kvfold.fitting.stage_table` run without data."""

BESIDE: Mapping[Place, int] = MappingProxyType({"cpu": 2**29, "cuda": 2**30})
"""Bytes that are set aside for what is not tensors, by device."""


@dataclass(frozen=True)
class StagePrediction:
    """One stage. components: bytes at the peak, by what they are, the largest first. work: all of
    it, or, where `whole` is false, that of two batches: how many there are is not known.
    """

    name: str
    peak_bytes: int
    components: Mapping[str, int]
    work: Work
    whole: bool

    def to_dict(self, machine: Machine | None) -> dict[str, Any]:
        """As plain data; seconds are None where they can't be known."""
        return {
            "stage": self.name,
            "peak_bytes": self.peak_bytes,
            "components": dict(self.components),
            "operations": dict(self.work.operations) if self.whole else None,
            "seconds": self.seconds(machine),
        }

    def seconds(self, machine: Machine | None) -> float | None:
        """How long it takes on a machine; None without one, or for a length that is not known."""
        return machine.seconds(self.work) if machine is not None and self.whole else None


@dataclass(frozen=True)
class Prediction:
    """All stages of a recipe, on one kind of device."""

    recipe: str
    place: Place
    dtype: str
    base_bytes: int
    addon_values: int
    stages: tuple[StagePrediction, ...]

    @property
    def worst(self) -> StagePrediction:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def needed_bytes(self) -> int:
        """The highest peak, with what is set aside for all that is not tensors."""
        return self.worst.peak_bytes + BESIDE[self.place]

    def to_dict(self, machine: Machine | None = None, limit: int | None = None) -> dict[str, Any]:
        """As plain data. machine: what seconds are worked out for. limit: as in `require`."""
        return {
            "recipe": self.recipe,
            "device": self.place,
            "dtype": self.dtype,
            "base_bytes": self.base_bytes,
            "addon_values": self.addon_values,
            "peak_bytes": self.worst.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "limit_bytes": limit,
            "machine": None if machine is None else machine.assumption,
            "stages": [stage.to_dict(machine) for stage in self.stages],
        }

    def require(self, limit: int) -> None:
        """Raise `MemoryLimitError` if a stage needs more memory than that, in bytes."""
        if self.needed_bytes <= limit:
            return
        largest = list(self.worst.components.items())[:3]
        made_of = ", ".join(f"{name} {shown_bytes(size)}" for name, size in largest)
        raise MemoryLimitError(
            f"the recipe {self.recipe!r} must run within {shown_bytes(limit)}; its stage "
            f"{self.worst.name} is predicted to need {shown_bytes(self.worst.peak_bytes)} of "
            f"tensors ({made_of}) and about {shown_bytes(BESIDE[self.place])} beside them; take "
            "fewer or shorter rows, checkpoint_layers: true, or a smaller dtype"
        )


def predict(recipe: Recipe, config: Any, place: Place, dtype: torch.dtype) -> Prediction:
    """What a recipe takes with the model of a configuration.

    config: transformers' configuration. place: the kind of device. dtype: of the base model.
    Raises what plans and stages raise, and `FitError` for a model or stage whose code goes on by
    values that it has computed.
    """
    shape = anatomy(config)
    plan = check_stages(recipe, shape)
    model = meta_model(config, dtype)
    text = dry_text(recipe)
    stages = tuple(_stage(model, plan, text, entry, place) for entry in recipe.stages)
    weights = [*model.parameters(), *model.buffers()]
    return Prediction(
        recipe.name,
        place,
        str(dtype).removeprefix("torch."),
        sum(weight.nbytes for weight in {id(w): w for w in weights}.values()),
        sum(weight.numel() for weight in _untrained(model, plan).parameters()),
        stages,
    )


def dry_text(recipe: Recipe) -> DryText:
    """The shape of a recipe's text. What is held out comes off the texts' tokens."""
    known = [part.tokens for part in recipe.text if part.tokens is not None]
    rows = sum(known) // recipe.seq if len(known) == len(recipe.text) else None
    return DryText(recipe.seq, max(1, recipe.held_out_tokens // recipe.seq), rows)


def _untrained(model: Any, plan: Plan) -> AddOn:
    with torch.device("meta"):
        return AddOn.untrained(model, plan)


def _stage(
    model: Any, plan: Plan, text: DryText, entry: StageEntry, place: Place
) -> StagePrediction:
    if entry.name not in DRY:
        raise RecipeError(
            f"a dry run knows the stages {', '.join(DRY)}; it can't predict {entry.name!r}"
        )
    addon = _untrained(model, plan)
    on_host = place == "cpu"
    meter = LiveMemory(lambda device: device.type == "meta" or on_host)
    with dry_world(place), meter:
        meter.hold(BASE, [*model.parameters(), *model.buffers()])
        meter.hold(ADDON, addon.parameters())
        try:
            whole = DRY[entry.name](model, addon, text, entry.settings, meter)
        except KvfoldError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise FitError(
                f"a dry run follows code that does not depend on values; the stage {entry.name} "
                f"of this model's does ({str(error).splitlines()[0]}); run it instead"
            ) from error
    components = sorted(meter.at_peak.items(), key=lambda item: -item[1])
    gc.collect()
    return StagePrediction(entry.name, meter.peak, dict(components), meter.work, whole)
