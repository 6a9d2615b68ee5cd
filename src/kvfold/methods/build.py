"""How a plan becomes pipelines with zero weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from kvfold.anatomy import Anatomy
from kvfold.methods.base import DepthMethod
from kvfold.methods.ced import CedFold, CedMaps
from kvfold.methods.csa2 import Csa2Fold
from kvfold.methods.drop import DropFold
from kvfold.methods.identity import IdentityFold
from kvfold.methods.latent import LatentFold
from kvfold.methods.lora import Lora
from kvfold.methods.pipeline import Bits, Pipeline
from kvfold.methods.pool import PoolGate
from kvfold.methods.state_projector import StateProjector
from kvfold.plan import Ced, Csa2, Drop, Identity, Latent, Plan, Pool, Turboquant

SEED = 0
"""Of what modules draw as they are made, before they are set to zero or trained."""


@contextmanager
def _own_draws() -> Iterator[None]:
    """Draws of new modules come from a seed of their own; the caller's random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        yield


@_own_draws()
def build_pipelines(plan: Plan, anatomy: Anatomy) -> nn.ModuleList:
    """The plan's pipelines with zero weights, each a `Pipeline`: those of the depth axis in the
    plan's order, then one for each layer that only another axis names.

    A `ced` entry that feeds a `csa2` source becomes part of that csa2 method. Raises `PlanError`
    if the plan does not fit the model.
    """
    plan.check(anatomy)
    depth = _depth_methods(plan, anatomy)
    served = {layer for method in depth for layer in method.layers}
    depth.extend(_identity(layer, anatomy) for layer in plan.folded_layers if layer not in served)
    return nn.ModuleList([_pipeline(method, plan, anatomy) for method in depth])


def rebuilt_pipelines(plan: Plan, anatomy: Anatomy, fitted: Iterable[nn.Module]) -> list[Pipeline]:
    """The plan's pipelines with the depth methods and gates of fitted ones for the same layers.

    The plan must have the depth and sequence axes that the others were fitted for; the rest, bits
    included, has no weights and may differ.
    """
    known = {pipeline.layers: pipeline for pipeline in fitted if isinstance(pipeline, Pipeline)}
    with torch.device("meta"):
        wanted = [p for p in build_pipelines(plan, anatomy) if isinstance(p, Pipeline)]
    for pipeline in wanted:
        if pipeline.layers in known:
            pipeline.depth = known[pipeline.layers].depth
            pipeline.sequence = known[pipeline.layers].sequence
    return wanted


@_own_draws()
def build_state_projector(plan: Plan, anatomy: Anatomy) -> StateProjector | None:
    """The plan's state projector with zero weights, None if the plan has none.

    Raises `PlanError` if the plan does not fit the model.
    """
    plan.check(anatomy)
    if not plan.state_projector:
        return None
    assert plan.split is not None
    skipped = [n for n in anatomy.layers[plan.split :] if n.kind == "linear_attention"]
    layers = tuple(layer.index for layer in skipped)
    return StateProjector(plan.split, layers, anatomy.hidden_size, skipped[0].heads)


def build_lora(plan: Plan, anatomy: Anatomy) -> Lora | None:
    """The plan's low-rank terms, which change nothing yet; None if the plan has none.

    Raises `PlanError` if the plan does not fit the model.
    """
    plan.check(anatomy)
    if plan.lora is None:
        return None
    widths = {
        (layer, target): anatomy.projection_widths(layer, target)
        for layer in plan.lora_layers
        for target in plan.lora.targets
    }
    return Lora(widths, plan.lora.rank, plan.lora.scale)


def _pipeline(depth: DepthMethod, plan: Plan, anatomy: Anatomy) -> Pipeline:
    first = depth.layers[0]
    pool = next((entry for entry in plan.sequence if first in entry.layers), None)
    bits = next((entry for entry in plan.bits if first in entry.layers), None)
    return Pipeline(
        depth,
        None if pool is None else _gate(pool, depth, anatomy),
        None if bits is None else _bits(bits),
        group=plan.group_of(first),
        slot_position=0.0 if pool is None else _slot_position(pool),
    )


def _bits(entry: Turboquant) -> Bits:
    return Bits(entry.key_bits, entry.value_bits, entry.seed)


def _slot_position(entry: Pool) -> float:
    return {"first": 0.0, "mean": (entry.group - 1) / 2, "last": entry.group - 1.0}[entry.position]


def _gate(entry: Pool, depth: DepthMethod, anatomy: Anatomy) -> PoolGate:
    return PoolGate(
        depth.code_parts,
        anatomy.hidden_size,
        {layer: anatomy.layers[layer].heads for layer in depth.layers},
        entry.group,
        gate=entry.gate,
        gate_rank=entry.gate_rank,
        overlap=entry.overlap,
        mass_bias=entry.mass_bias,
    )


def _depth_methods(plan: Plan, anatomy: Anatomy) -> list[DepthMethod]:
    sources = {
        layer
        for entry in plan.depth
        if isinstance(entry, Csa2)
        for layer in set(entry.layers) - set(entry.readers)
    }
    feeding: dict[int, CedMaps] = {}
    for entry in plan.depth:
        if isinstance(entry, Ced) and sources.intersection(entry.layers):
            maps = _ced_maps(entry, anatomy)
            feeding.update(dict.fromkeys(entry.layers, maps))
    made: list[DepthMethod] = []
    for entry in plan.depth:
        if isinstance(entry, Identity):
            made.extend(_identity(layer, anatomy) for layer in entry.layers)
        elif isinstance(entry, Drop):
            made.append(DropFold(entry.layers))
        elif isinstance(entry, Latent):
            made.append(_latent(entry, anatomy))
        elif isinstance(entry, Csa2):
            made.append(_csa2(entry, anatomy, feeding.get(entry.source)))
        elif entry.layers[0] not in feeding:
            made.append(CedFold(_ced_maps(entry, anatomy)))
    return made


def _identity(layer: int, anatomy: Anatomy) -> IdentityFold:
    like = anatomy.layers[layer]
    return IdentityFold(layer, like.kv_heads, like.head_dim)


def _ced_maps(entry: Ced, anatomy: Anatomy) -> CedMaps:
    first = anatomy.layers[entry.layers[0]]
    return CedMaps(
        entry.split,
        entry.layers,
        anatomy.hidden_size,
        first.kv_heads,
        first.head_dim,
        bias=entry.bias,
        normalize=entry.normalize,
    )


def _csa2(entry: Csa2, anatomy: Anatomy, ced: CedMaps | None) -> Csa2Fold:
    first = anatomy.layers[entry.layers[0]]
    return Csa2Fold(
        entry.source,
        entry.readers,
        first.kv_heads,
        first.head_dim,
        form=entry.form,
        bias=entry.bias,
        residual_hidden=entry.residual_hidden,
        value_source=entry.value_source,
        ced=ced,
    )


def _latent(entry: Latent, anatomy: Anatomy) -> LatentFold:
    first = anatomy.layers[entry.layers[0]]
    return LatentFold(
        entry.layers,
        first.kv_width,
        first.head_dim,
        entry.rank,
        value_rank=entry.value_rank,
        split=entry.split,
        hidden_size=anatomy.hidden_size,
        unit_keys=first.k_norm != "none",
    )
