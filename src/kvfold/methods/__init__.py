"""The methods of each axis, one file each, and how a plan becomes a set of them."""

from __future__ import annotations

from torch import nn

from kvfold.anatomy import Anatomy
from kvfold.methods.base import (
    Activations,
    AffineMap,
    Components,
    DepthMethod,
    Problem,
    Regression,
    Source,
)
from kvfold.methods.ced import CedFold, CedMaps
from kvfold.methods.csa2 import Csa2Fold
from kvfold.methods.drop import DropFold
from kvfold.methods.identity import IdentityFold
from kvfold.methods.latent import LatentFold, unit_rms_heads
from kvfold.plan import Ced, Csa2, Drop, Identity, Latent, Plan

__all__ = [
    "Activations",
    "AffineMap",
    "CedFold",
    "CedMaps",
    "Components",
    "Csa2Fold",
    "DepthMethod",
    "DropFold",
    "IdentityFold",
    "LatentFold",
    "Problem",
    "Regression",
    "Source",
    "build_methods",
    "unit_rms_heads",
]


def build_methods(plan: Plan, anatomy: Anatomy) -> nn.ModuleList:
    """The plan's methods with zero weights, in the plan's order, each a `DepthMethod`.

    A `ced` entry that feeds a `csa2` source becomes part of that csa2 method. Raises `PlanError`
    if the plan does not fit the model.
    """
    plan.check(anatomy)
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
        width = anatomy.layers[entry.layers[0]].kv_width
        if isinstance(entry, Identity):
            made.extend(IdentityFold(layer, width) for layer in entry.layers)
        elif isinstance(entry, Drop):
            made.append(DropFold(entry.layers))
        elif isinstance(entry, Latent):
            made.append(_latent(entry, anatomy))
        elif isinstance(entry, Csa2):
            made.append(_csa2(entry, width, feeding.get(entry.source)))
        elif entry.layers[0] not in feeding:
            made.append(CedFold(_ced_maps(entry, anatomy)))
    return nn.ModuleList(made)


def _ced_maps(entry: Ced, anatomy: Anatomy) -> CedMaps:
    return CedMaps(
        entry.split,
        entry.layers,
        anatomy.hidden_size,
        anatomy.layers[entry.layers[0]].kv_width,
        bias=entry.bias,
        normalize=entry.normalize,
    )


def _csa2(entry: Csa2, kv_width: int, ced: CedMaps | None) -> Csa2Fold:
    return Csa2Fold(
        entry.source,
        entry.readers,
        kv_width,
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
