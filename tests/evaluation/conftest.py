"""Add-ons without a fit, for measures that only need something to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from kvfold.anatomy import anatomy
from kvfold.methods import build_pipelines
from kvfold.plan import Plan


@dataclass
class BareAddOn:
    """Methods under a plan, for whatever model."""

    plan: Plan
    pipelines: nn.ModuleList
    state_projector: None = None
    lora: None = None

    def check_base(self, model: Any) -> None:
        """Every model will do."""


@pytest.fixture(scope="session")
def bare_addon() -> Callable[..., BareAddOn]:
    """`bare_addon(model, plan, scale=...)`: an add-on whose weights are random of that scale."""

    def make(model: Any, plan: Plan, scale: float = 0.1) -> BareAddOn:
        pipelines = build_pipelines(plan, anatomy(model))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(3)
            for parameter in pipelines.parameters():
                parameter.copy_(scale * torch.randn_like(parameter))
        return BareAddOn(plan, pipelines.to(model.dtype))

    return make


@pytest.fixture(scope="session")
def windows() -> torch.Tensor:
    """Six windows of 40 tokens of a vocabulary of 97."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 97, (6, 40), generator=generator)
