"""The methods of each axis, one file each, and how a plan becomes a set of them."""

from __future__ import annotations

from kvfold.methods.base import (
    Activations,
    AffineMap,
    CodePart,
    Components,
    DepthMethod,
    Problem,
    Regression,
    Source,
)
from kvfold.methods.build import (
    build_lora,
    build_pipelines,
    build_state_projector,
    rebuilt_pipelines,
)
from kvfold.methods.ced import CedFold, CedMaps
from kvfold.methods.csa2 import Csa2Fold
from kvfold.methods.drop import DropFold
from kvfold.methods.identity import IdentityFold
from kvfold.methods.latent import LatentFold, unit_rms_heads
from kvfold.methods.lora import Lora, LowRank
from kvfold.methods.pipeline import Bits, Pipeline, depth_methods
from kvfold.methods.pool import PoolGate
from kvfold.methods.state_projector import StateProjector

__all__ = [
    "Activations",
    "AffineMap",
    "Bits",
    "CedFold",
    "CedMaps",
    "CodePart",
    "Components",
    "Csa2Fold",
    "DepthMethod",
    "DropFold",
    "IdentityFold",
    "LatentFold",
    "Lora",
    "LowRank",
    "Pipeline",
    "PoolGate",
    "Problem",
    "Regression",
    "Source",
    "StateProjector",
    "build_lora",
    "build_pipelines",
    "build_state_projector",
    "depth_methods",
    "rebuilt_pipelines",
    "unit_rms_heads",
]
