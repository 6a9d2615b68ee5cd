"""What kvfold reads out of a model, on every family and on what is not one."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.anatomy import (
    FAMILIES,
    attention_module,
    k_norm_weight,
    linear_attention_module,
    linear_inputs,
    mixer_module,
    rotary,
    supported_attention,
    text_decoder,
)
from kvfold.errors import KvfoldError, UnsupportedModelError

EXPECTED = {
    # family: (name, foldable layers, rotary_dim, k_norm, output_gate)
    "llama": ("Llama", (0, 1, 2, 3, 4, 5), 16, "none", False),
    "mistral": ("Mistral", (0, 1, 2, 3, 4, 5), 16, "none", False),
    "qwen2": ("Qwen2", (0, 1, 2, 3, 4, 5), 16, "none", False),
    "qwen3": ("Qwen3", (0, 1, 2, 3, 4, 5), 16, "rms", False),
    "qwen3_moe": ("Qwen3-MoE", (0, 1, 2, 3, 4, 5), 16, "rms", False),
    "qwen3_5": ("Qwen3.5", (3, 7), 4, "rms_plus_one", True),
    "qwen3_5_moe": ("Qwen3.5-MoE", (3, 7), 4, "rms_plus_one", True),
    "gemma3": ("Gemma 3", (1, 2, 4, 5), 16, "rms_plus_one", False),
    "smollm3": ("SmolLM3", (0, 1, 2, 3, 4, 5), 16, "none", False),
    "phi3": ("Phi-3", (0, 1, 2, 3, 4, 5), 8, "none", False),
}


def test_every_family_is_described(tiny_config, family):
    name, foldable, rotary_dim, k_norm, gate = EXPECTED[family]
    described = kvfold.anatomy(tiny_config(family))
    assert described.family.name == name
    assert described.foldable_layers == foldable
    assert (described.hidden_size, described.vocab_size) == (32, 97)
    first = described.layers[foldable[0]]
    assert (first.heads, first.kv_heads, first.head_dim) == (4, 2, 16)
    assert first.kv_width == 32
    assert (first.rotary_dim, first.k_norm, first.output_gate) == (rotary_dim, k_norm, gate)
    assert described.rope_is_static


def test_a_model_and_its_configuration_give_the_same_anatomy(tiny_model, family):
    model = tiny_model(family)
    assert kvfold.anatomy(model) == kvfold.anatomy(model.config)


def test_every_entry_of_the_table_has_a_tiny_model():
    assert {family.name for family in FAMILIES} == {name for name, *_ in EXPECTED.values()}


def test_projections_are_what_the_attention_module_caches(tiny_model, family, cache_argument):
    from transformers import DynamicCache

    model = tiny_model(family)
    described = kvfold.anatomy(model)
    layer = described.foldable_layers[0]
    attention = attention_module(model, layer)
    seen = {}
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(hidden=kwargs["hidden_states"]), with_kwargs=True
    )
    cache = DynamicCache(config=model.config)
    ids = torch.arange(3, 15).view(1, -1)
    with torch.no_grad():
        model(ids, **cache_argument(model, cache))
        made = described.family.project(attention, seen["hidden"])
    shape = described.layers[layer]
    assert made.queries.shape == (1, shape.heads, 12, shape.head_dim)
    assert made.keys.shape == (1, shape.kv_heads, 12, shape.head_dim)
    torch.testing.assert_close(made.values, cache.layers[layer].values)
    assert (made.gate is not None) == shape.output_gate
    expected = _rope(model, described, attention, made.keys, shape)
    torch.testing.assert_close(expected, cache.layers[layer].keys)


def _rope(model, described, attention, keys, shape):
    """Norm and rotate keys by the words of `anatomy`'s docstring."""
    norm = k_norm_weight(described.family, attention)
    if norm is not None:
        weight, epsilon = norm
        keys = weight * keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + epsilon)
    positions = torch.arange(keys.shape[2]).view(1, -1)
    cos, sin = rotary(model, described.family, positions, keys)
    width = shape.rotary_dim
    if width == 0:
        return keys
    cos, sin = cos[:, None, :, :width], sin[:, None, :, :width]
    turned, rest = keys[..., :width], keys[..., width:]
    one, two = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-two, one], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1)


def test_column_offsets_of_keys_and_values_match_the_projections(tiny_model, family):
    model = tiny_model(family)
    described = kvfold.anatomy(model)
    layer = described.foldable_layers[0]
    attention = attention_module(model, layer)
    width = described.layers[layer].kv_width
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made = described.family.project(attention, hidden)
        for (module, start), heads in zip(
            described.family.keys_values(attention), (made.keys, made.values), strict=True
        ):
            flat = module(hidden)[..., start : start + width]
            torch.testing.assert_close(flat, heads.transpose(1, 2).reshape(1, 5, width))


def test_the_text_half_of_a_multimodal_wrapper_is_described(tiny_config):
    from transformers import Gemma3Config, Qwen3_5Config, Qwen3_5MoeConfig

    for wrapper, family in (
        (Qwen3_5Config, "qwen3_5"),
        (Qwen3_5MoeConfig, "qwen3_5_moe"),
        (Gemma3Config, "gemma3"),
    ):
        text = tiny_config(family)
        described = kvfold.anatomy(wrapper(text_config=text.to_dict()))
        assert described.layers == kvfold.anatomy(text).layers
        assert described.family.name == EXPECTED[family][0]


def test_hybrids_report_their_recurrent_state(tiny_config):
    described = kvfold.anatomy(tiny_config("qwen3_5"))
    assert described.is_hybrid
    linear = described.layers[0]
    assert linear.kind == "linear_attention"
    assert linear.kv_width == 0
    assert linear.state_values == 4 * 8 * 8
    assert linear.convolution_values == (2 * 2 * 8 + 4 * 8) * 4
    assert described.bytes_per_token(2) == 2 * 2 * 32 * 2
    assert described.recurrent_bytes(2) == 6 * (4 * 256 + 2 * 256)


def test_recurrent_bytes_equal_the_real_states(tiny_model, cache_argument):
    from transformers import DynamicCache

    model = tiny_model("qwen3_5")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(3, 15).view(1, -1), **cache_argument(model, cache))
    described = kvfold.anatomy(model)
    real = 0
    for layer in described.layers:
        if layer.kind == "linear_attention":
            held = cache.layers[layer.index]
            for states in (held.conv_states, held.recurrent_states):
                tensors = states.values() if isinstance(states, dict) else [states]
                real += sum(t.numel() * t.element_size() for t in tensors if t is not None)
    assert described.recurrent_bytes(element_size=4) == real


def test_smollm3_layers_without_rope_have_no_rotary_part(tiny_config):
    described = kvfold.anatomy(tiny_config("smollm3"))
    assert [layer.rotary_dim for layer in described.layers] == [16, 16, 0, 16, 16, 0]


def test_gemma3_sliding_layers_are_not_foldable(tiny_config):
    described = kvfold.anatomy(tiny_config("gemma3"))
    assert [layer.sliding_window for layer in described.layers] == [8, None, None, 8, None, None]
    assert not described.is_hybrid


def test_a_windowed_mistral_has_nothing_to_fold(tiny_config):
    described = kvfold.anatomy(tiny_config("mistral", sliding_window=8))
    assert described.foldable_layers == ()
    assert {layer.kind for layer in described.layers} == {"sliding_attention"}


def test_dynamic_rope_is_told_apart(tiny_config):
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert not kvfold.anatomy(tiny_config("llama", rope_parameters=dynamic)).rope_is_static


def test_an_unknown_architecture_lists_the_supported_ones_and_how_to_add_one():
    from transformers import GPT2Config

    with pytest.raises(UnsupportedModelError, match="gpt2") as caught:
        kvfold.anatomy(GPT2Config())
    message = str(caught.value)
    assert all(family.name in message for family in FAMILIES)
    assert "CONTRIBUTING.md" in message
    assert isinstance(caught.value, (KvfoldError, TypeError))


def test_soft_capped_attention_is_refused(tiny_config):
    with pytest.raises(UnsupportedModelError, match="soft-capped"):
        kvfold.anatomy(tiny_config("gemma3", attn_logit_softcapping=20.0))


def test_an_unknown_layer_kind_is_refused(tiny_config):
    config = tiny_config("qwen3")
    config.layer_types = ["chunked_attention"] * 6
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        kvfold.anatomy(config)


def test_other_attention_implementations_are_refused(tiny_model):
    model = tiny_model("llama")
    supported_attention(model)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="flex_attention"):
        supported_attention(model)


def test_a_module_that_is_no_decoder_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear"):
        text_decoder(torch.nn.Linear(2, 2))


HYBRIDS = ("qwen3_5", "qwen3_5_moe")


def test_the_mixer_of_a_layer_is_its_attention_or_its_linear_attention(tiny_model, family):
    model = tiny_model(family)
    for layer in kvfold.anatomy(model).layers:
        linear = layer.kind == "linear_attention"
        made = linear_attention_module if linear else attention_module
        assert mixer_module(model, layer.index) is made(model, layer.index)


@pytest.mark.parametrize("name", HYBRIDS)
def test_inputs_of_linear_attention_are_what_its_rule_is_given(tiny_model, name, monkeypatch):
    """From the accessor's weights follows every tensor that the module hands to its delta rule."""
    model = tiny_model(name)
    module = linear_attention_module(model, 2)
    weights = linear_inputs(module)
    given = _delta_rule_arguments(module, monkeypatch)
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        module(hidden)
        channels = (hidden @ weights.qkv_weight.T).transpose(1, 2)
        assert weights.conv_weight.shape == (channels.shape[1], 4)
        padded = torch.nn.functional.pad(channels, (3, 0))
        mixed = torch.nn.functional.conv1d(
            padded, weights.conv_weight[:, None], weights.conv_bias, groups=channels.shape[1]
        )
        mixed = torch.nn.functional.silu(mixed).transpose(1, 2)
        g = torch.nn.functional.softplus(hidden @ weights.a_weight.T + weights.dt_bias)
        beta = (hidden @ weights.b_weight.T).sigmoid()
        keys = mixed[..., weights.k_channels].unflatten(2, (weights.k_heads, weights.k_dim))
        values = mixed[..., weights.v_channels].unflatten(2, (weights.v_heads, weights.v_dim))
        queries = mixed[..., : weights.k_channels.start].unflatten(2, (weights.k_heads, -1))
    assert weights.v_channels.stop == channels.shape[1]
    for name, expected in (
        ("queries", queries),
        ("keys", keys),
        ("values", values),
        ("g", -weights.a_log.exp() * g),
        ("beta", beta),
    ):
        torch.testing.assert_close(given[name], expected)


def _delta_rule_arguments(module, monkeypatch):
    """What a linear-attention module passes to its chunked rule in the next forward."""
    import sys

    given = {}
    source = sys.modules[type(module).__module__]
    rule = source.torch_chunk_gated_delta_rule

    def record(query, key, value, g, beta, **settings):
        given.update(queries=query, keys=key, values=value, g=g, beta=beta)
        return rule(query, key, value, g=g, beta=beta, **settings)

    if hasattr(module, "torch_chunk_gated_delta_rule"):
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", record)
    monkeypatch.setattr(source, "torch_chunk_gated_delta_rule", record)
    return given


def test_value_heads_that_share_a_key_head_are_neighbours(tiny_model):
    weights = linear_inputs(linear_attention_module(tiny_model("qwen3_5"), 0))
    expected = torch.arange(weights.k_heads).repeat_interleave(weights.v_heads // weights.k_heads)
    assert weights.head_of == tuple(expected.tolist()) == (0, 0, 1, 1)


def test_linear_attention_with_another_activation_is_refused(tiny_model):
    module = linear_attention_module(tiny_model("qwen3_5"), 0)
    module.activation = "gelu"
    with pytest.raises(UnsupportedModelError, match="SiLU"):
        linear_inputs(module)
