"""Capture gives what the plain model computes, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch

from kvfold.anatomy import anatomy, attention_module, linear_attention_module, text_decoder
from kvfold.errors import FitError
from kvfold.methods import Source
from kvfold.runtime.capture import capture

IDS = torch.arange(24).reshape(2, 12) % 90 + 3


def _all_sources(shape):
    kinds = [
        Source(kind, n) for n in shape.foldable_layers for kind in ("inputs", "keys", "values")
    ]
    return {*kinds, *(Source("hidden", n) for n in range(shape.num_layers + 1))}


def _hook_count(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def test_captured_activations_are_those_of_a_whole_forward(tiny_model, family):
    model = tiny_model(family)
    shape = anatomy(model)
    got = capture(model, shape, _all_sources(shape), IDS)
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
        for index in range(shape.num_layers):
            torch.testing.assert_close(got[Source("hidden", index)], states[index])
        norm = text_decoder(model).norm
        last = got[Source("hidden", shape.num_layers)]
        torch.testing.assert_close(norm(last), states[-1])
        for layer in shape.foldable_layers:
            hidden = got[Source("inputs", layer)]
            made = shape.family.project(attention_module(model, layer), hidden)
            for kind, heads in (("keys", made.keys), ("values", made.values)):
                flat = heads.transpose(1, 2).flatten(2)
                torch.testing.assert_close(got[Source(kind, layer)], flat)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_inputs_of_a_linear_attention_layer_are_what_its_projections_read(tiny_model, name):
    model = tiny_model(name)
    read = {}
    for layer in (0, 2, 5):
        linear_attention_module(model, layer).in_proj_qkv.register_forward_pre_hook(
            lambda _, args, layer=layer: read.setdefault(layer, args[0])
        )
    got = capture(model, anatomy(model), {Source("inputs", layer) for layer in (0, 2, 5)}, IDS)
    assert set(read) == {0, 2}  # the forward stops at the last layer's input
    with torch.no_grad():
        model(IDS, use_cache=False)
        states = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
        for layer in (0, 2, 5):
            inputs = got[Source("inputs", layer)]
            torch.testing.assert_close(inputs, read[layer])
            normed = text_decoder(model).layers[layer].input_layernorm(states[layer])
            torch.testing.assert_close(inputs, normed)


def test_hooks_are_gone_afterwards(tiny_model, family):
    model = tiny_model(family)
    shape = anatomy(model)
    before = _hook_count(model)
    capture(model, shape, _all_sources(shape), IDS)
    assert _hook_count(model) == before


def test_forward_stops_after_the_last_activation_that_is_needed(tiny_model):
    model = tiny_model("llama")
    seen = []
    handle = model.model.layers[2].mlp.register_forward_hook(lambda *_: seen.append(2))
    capture(model, anatomy(model), {Source("keys", 2), Source("values", 2)}, IDS)
    handle.remove()
    assert seen == []


def test_no_sources_need_no_forward(tiny_model):
    model = tiny_model("llama")
    assert capture(model, anatomy(model), set(), IDS) == {}


@pytest.mark.parametrize("source", [Source("keys", 3), Source("values", 3), Source("hidden", 3)])
def test_non_finite_activations_name_their_layer_and_leave_no_hooks(tiny_model, source):
    model = tiny_model("llama")
    before = _hook_count(model)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(FitError, match=f"finite; {source} has"):
        capture(model, anatomy(model), {source}, IDS)
    assert _hook_count(model) == before


def test_error_inside_the_forward_leaves_no_hooks(tiny_model):
    model = tiny_model("llama")

    def fail(*_):
        raise RuntimeError("inside")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    before = _hook_count(model)
    with pytest.raises(RuntimeError, match="inside"):
        capture(model, anatomy(model), {Source("keys", 3)}, IDS)
    assert _hook_count(model) == before
    handle.remove()
