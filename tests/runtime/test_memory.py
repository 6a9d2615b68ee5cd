"""Folded prefill never forms anything that grows with the square of the prompt's length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.anatomy import anatomy, text_decoder
from kvfold.methods import build_pipelines
from kvfold.plan import Plan
from kvfold.runtime.attach import attach


class LargestTensor(TorchDispatchMode):
    """Remembers the most values that any tensor made inside it has."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it gives."""
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.values = max(self.values, tensor.untyped_storage().size() // 4)
        return made


class Untrained:
    """Zero weights; only sizes count here."""

    state_projector = None
    lora = None

    def __init__(self, model: Any, reading: str) -> None:
        layers = list(anatomy(model).foldable_layers)
        depth = [{"method": "latent", "layers": layers, "rank": 8}]
        self.plan = Plan.from_dict({"window": 64, "resident": reading, "depth": depth})
        self.pipelines: nn.ModuleList = build_pipelines(self.plan, anatomy(model))

    def check_base(self, model: Any) -> None:
        """Any."""


@pytest.mark.parametrize("reading", ["expanded", "shared", "absorbed"])
def test_largest_tensor_of_a_folded_prefill_grows_with_the_length(
    tiny_model: Callable[..., Any], reading: str
) -> None:
    """Twice the prompt, at most a little more than twice the largest tensor."""
    model = tiny_model("llama", max_position_embeddings=8192, attention_bias=False)
    largest = {}
    for length in (512, 1024, 2048):
        ids = torch.arange(length)[None] % 90 + 3
        with attach(model, Untrained(model, reading)), torch.no_grad(), LargestTensor() as seen:
            text_decoder(model)(input_ids=ids)
        largest[length] = seen.values
    assert largest[2048] < 2048 * 2048 / 4
    assert largest[2048] <= 2.2 * largest[1024] <= 2.2 * 2.2 * largest[512]
