"""Every fast path of folded attention against the plain reference, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvfold.anatomy import anatomy, attention_module, rotary, text_decoder
from kvfold.methods import Pipeline, Source, build_pipelines
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.runtime.layer import FoldedAttention, Rotation
from kvfold.runtime.reference import reference_attention


class RandomWeights:
    """One layer's own keys and values through a random code, so that slots differ from them."""

    state_projector = None
    lora = None

    def __init__(self, model: Any, layer: int, **keys: Any) -> None:
        depth = [{"method": "latent", "layers": [layer], "rank": 24}]
        self.plan = Plan.from_dict({**keys, "depth": depth})
        self.pipelines: nn.ModuleList = build_pipelines(self.plan, anatomy(model))
        generator = torch.Generator().manual_seed(5)
        for parameter in self.pipelines.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 6

    def check_base(self, model: Any) -> None:
        """Any."""


@pytest.mark.parametrize("reading", ["expanded", "shared", "absorbed"])
@pytest.mark.parametrize(("anchors", "window"), [(3, 7), (0, 5), (2, 1)])
def test_folded_attention_equals_the_reference(
    tiny_model: Callable[..., Any], family: str, reading: str, anchors: int, window: int
) -> None:
    """The first folded layer's inputs are the plain model's, so its output can be recomputed."""
    model = tiny_model(family)
    layer = anatomy(model).foldable_layers[1]
    addon = RandomWeights(model, layer, anchors=anchors, window=window, resident=reading)
    ids = torch.arange(40)[None] * 7 % 89 + 3
    module = attention_module(model, layer)
    caught: dict[str, torch.Tensor] = {}

    def catch_hidden(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        caught.setdefault("hidden", output)

    def catch_output(_module: nn.Module, args: tuple[torch.Tensor]) -> None:
        before = [caught["output"]] if "output" in caught else []
        caught["output"] = torch.cat([*before, args[0]], dim=1)

    norm = text_decoder(model).layers[layer].input_layernorm
    hooks = [
        norm.register_forward_hook(catch_hidden),
        module.o_proj.register_forward_pre_hook(catch_output),
    ]
    with torch.no_grad():
        model(ids)
        hidden = caught.pop("hidden")
        caught.clear()
        with attach(model, addon):
            model(ids)
    for hook in hooks:
        hook.remove()
    expected = _reference(model, layer, addon, hidden)
    torch.testing.assert_close(caught["output"], expected, atol=5e-3, rtol=0)


def _reference(model: Any, layer: int, addon: Any, hidden: torch.Tensor) -> torch.Tensor:
    shape = anatomy(model)
    pipeline: Pipeline = addon.pipelines[0]
    module = attention_module(model, layer)
    fold = FoldedAttention(layer, module, shape.family, shape.layers[layer], pipeline, "expanded")
    with torch.no_grad():
        made = shape.family.project(module, hidden)
        positions = torch.arange(hidden.shape[1])[None]
        rotation = Rotation.of(*rotary(model, shape.family, positions, hidden))
        flat = {
            Source("keys", layer): made.keys.transpose(1, 2).flatten(2),
            Source("values", layer): made.values.transpose(1, 2).flatten(2),
        }
        slots = fold.unfold(pipeline.depth.encode(flat)[:, None], rotation)
        output = reference_attention(
            fold.finish_queries(made.queries, rotation),
            fold.finish_keys(made.keys, rotation),
            made.values,
            *(part[:, :, addon.plan.anchors :] for part in slots),
            anchors=addon.plan.anchors,
            window=addon.plan.window,
            scaling=fold.scaling,
        )
    mixed = output.transpose(1, 2).flatten(2)
    return mixed if made.gate is None else mixed * torch.sigmoid(made.gate)
