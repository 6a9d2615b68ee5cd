"""A model as a fit needs it: in evaluation mode and without gradients, until it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's and weight's own state comes back."""
    modes = [(module, module.training) for module in model.modules()]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval().requires_grad_(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter in learning:
            parameter.requires_grad_(True)
