"""How far one step may move each weight: measured by what weights read and give.

A weight w_ij of a linear map moves its output i by its input j. With `std(y_i)` and `std(x_j)` as
they are on text, a step of

    learning rate * std(y_i) / (std(x_j) sqrt(inputs))

per weight moves each output by about the learning rate times its own spread, when inputs are
independent, whatever the scale of the layer. So one learning rate serves all maps of a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvfold.fitting.gates import score_scale
from kvfold.fitting.gram import Moments
from kvfold.fitting.parts import parameters_of
from kvfold.fitting.seeds import derived_seed
from kvfold.methods import Activations, Pipeline
from kvfold.methods.maps import residual_modules

GATE_SCALE = 3.0
"""Scores and biases are logits, where 1 is much: a step of theirs is so many learning rates."""
LEAST_SHARE = 1e-2
"""Inputs and outputs that hardly vary are taken to vary by this share of the others' spread."""


def weight_groups(pipelines: Sequence[Pipeline], parts: Collection[str]) -> list[dict[str, Any]]:
    """Groups of `ScaledAdam`, one for each weight of some parts, with scales yet to be measured.

    name: the pipeline's number and the weight's name in it. A weight of several pipelines comes
    once.
    """
    groups, seen = [], set()
    for number, pipeline in enumerate(pipelines):
        for name, weight in parameters_of(pipeline, parts).items():
            if id(weight) not in seen:
                seen.add(id(weight))
                scale = GATE_SCALE if name.startswith("sequence.") else 1.0
                groups.append({"params": [weight], "name": f"{number}.{name}", "scale": scale})
    return groups


@torch.no_grad()
def start_weights(
    pipelines: Sequence[Pipeline],
    groups: Iterable[dict[str, Any]],
    batches: Sequence[Activations],
    anchors: int,
    seed: int,
) -> None:
    """Draw the first matrix of residual MLPs that were never trained, then measure all scales.

    batches: activations of some text, rows without padding.
    """
    by_name = {group["name"]: group for group in groups}
    for number, pipeline in enumerate(pipelines):
        trained = parameters_of(pipeline, ("residual",))
        if any(f"{number}.{name}" in by_name for name in trained):
            _draw_residuals(pipeline, batches, anchors, seed)
        spreads = _spreads(pipeline, batches, anchors)
        for name, weight in parameters_of(pipeline, ("maps", "residual")).items():
            if f"{number}.{name}" in by_name:
                by_name[f"{number}.{name}"]["scale"] = _scale(name, spreads).to(weight)
        if f"{number}.sequence.score.weight" in by_name:
            by_name[f"{number}.sequence.score.weight"]["scale"] = GATE_SCALE * score_scale(
                pipeline, batches[0]
            )


class _Spread(NamedTuple):
    """Standard deviations of what a module reads, (inputs,), and gives, (outputs,)."""

    inputs: Tensor
    outputs: Tensor


def _spreads(
    pipeline: Pipeline, batches: Sequence[Activations], anchors: int
) -> dict[str, _Spread]:
    """Spreads by module name, of every module of the depth method that came to act."""
    seen: dict[str, tuple[Moments, Moments]] = {}
    with _watched(pipeline, seen):
        for batch in batches:
            beyond = {source: x[:, anchors:] for source, x in batch.items()}
            codes = pipeline.whole_slots(pipeline.records(beyond), 0)
            for layer in pipeline.layers:
                pipeline.depth.decode(layer, codes)
    return {
        name: _Spread(_spread(inputs), _spread(outputs)) for name, (inputs, outputs) in seen.items()
    }


def _spread(moments: Moments) -> Tensor:
    """Standard deviations, none below `LEAST_SHARE` of their root mean square."""
    variance = moments.variance
    return variance.clamp(min=LEAST_SHARE**2 * float(variance.mean())).sqrt()


@contextmanager
def _watched(pipeline: Pipeline, seen: dict[str, tuple[Moments, Moments]]) -> Iterator[None]:
    """Take in what goes through each module of the depth method that maps one tensor to one."""

    def hook_of(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if name not in seen:
                widths = args[0].shape[-1], output.shape[-1]
                seen[name] = Moments(widths[0], output.device), Moments(widths[1], output.device)
            for moments, x in zip(seen[name], (args[0], output), strict=True):
                moments.add(x.reshape(-1, x.shape[-1]))

        return hook

    named = [(name, module) for name, module in pipeline.named_modules() if name]
    handles = [
        module.register_forward_hook(hook_of(name))
        for name, module in named
        if name.startswith("depth.")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scale(name: str, spreads: Mapping[str, _Spread]) -> Tensor:
    """The scale of a linear map's weight (outputs, inputs) or bias (outputs,) by its name."""
    module, _, kind = name.rpartition(".")
    if module not in spreads:
        return torch.ones(())  # nothing reads it, so it never gets a gradient
    outputs = _spread_around(module, spreads)
    if kind == "bias":
        return outputs
    inputs = spreads[module].inputs
    scale: Tensor = outputs[:, None] / (inputs * len(inputs) ** 0.5)
    return scale


def _spread_around(module: str, spreads: Mapping[str, _Spread]) -> Tensor:
    """What a module's outputs spread by; where they are all zero yet, what they are added to."""
    own = spreads[module].outputs
    outer = module
    while not bool(own.any()) and outer:
        outer = outer.rpartition(".")[0]
        around = spreads.get(outer)
        if around is not None and len(around.outputs) == len(own):
            own = around.outputs
    return own


def _draw_residuals(
    pipeline: Pipeline, batches: Sequence[Activations], anchors: int, seed: int
) -> None:
    """Where an MLP's last matrix is still zero, draw its first: hidden values of variance 1."""
    unstarted = {
        name: mlp for name, mlp in residual_modules(pipeline).items() if not _matrix(mlp[-1]).any()
    }
    spreads = _spreads(pipeline, batches, anchors) if unstarted else {}
    for name, mlp in unstarted.items():
        if f"{name}.0" not in spreads:
            continue
        weight, inputs = _matrix(mlp[0]), spreads[f"{name}.0"].inputs
        generator = torch.Generator().manual_seed(derived_seed(seed, "residual", name))
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.copy_(drawn.to(inputs) / (inputs * len(inputs) ** 0.5))


def _matrix(linear: nn.Module) -> Tensor:
    assert isinstance(linear, nn.Linear)
    return linear.weight
