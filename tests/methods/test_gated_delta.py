"""States by chunks, and the convolution, against a loop over tokens and transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from kvfold.anatomy import linear_attention_module, linear_inputs
from kvfold.methods.gated_delta import CHUNKS_AT_ONCE, causal_conv, delta_state, log_decay

EXACT = {"rtol": 1e-9, "atol": 1e-11}
"""float64 on both sides, sums in another order."""
SINGLE = {"rtol": 1e-4, "atol": 2e-6}
"""transformers computes states in float32, whatever it is given."""
HEAD_OF = (0, 0, 1, 1)


def tokens(seq, *, batch=2, k_heads=2, v_heads=4, k_dim=6, v_dim=5, seed=0, dtype=torch.float64):
    """Keys of very different lengths, decays from slow to fast, and a state to start from."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    pace = torch.logspace(-3, 0.5, v_heads, dtype=torch.float64)
    made = {
        "keys": normal(batch, seq, k_heads, k_dim) * normal(batch, seq, k_heads, 1).exp(),
        "values": normal(batch, seq, v_heads, v_dim),
        "decay": -functional.softplus(normal(batch, seq, v_heads)) * pace,
        "beta": normal(batch, seq, v_heads).sigmoid(),
        "state": normal(batch, v_heads, k_dim, v_dim),
    }
    return {name: x.to(dtype) for name, x in made.items()}


def token_by_token(keys, values, decay, beta, state, head_of=HEAD_OF, valid=None):
    """The rule as the module's docstring writes it, one token of one head at a time."""
    state = state.clone()
    keys = keys / (keys.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    for row in range(keys.shape[0]):
        for t in range(keys.shape[1]):
            if valid is not None and not valid[row, t]:
                continue
            for head, key_head in enumerate(head_of):
                k, s = keys[row, t, key_head], state[row, head] * decay[row, t, head].exp()
                u = beta[row, t, head] * (values[row, t, head] - s.T @ k)
                state[row, head] = s + torch.outer(k, u)
    return state


def index(head_of=HEAD_OF):
    return torch.tensor(head_of)


@pytest.mark.parametrize("seq", [0, 1, 3, 8, 21])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_states_by_chunks_equal_the_rule_token_by_token(seq, chunk):
    x = tokens(seq)
    before = x["state"].clone()
    got = delta_state(**x, head_of=index(), chunk=chunk)
    torch.testing.assert_close(got, token_by_token(**x), **EXACT)
    assert torch.equal(x["state"], before)


def test_more_chunks_than_are_prepared_at_once_change_nothing():
    seq = 2 * (2 * CHUNKS_AT_ONCE) + 3
    x = tokens(seq, batch=1)
    got = delta_state(**x, head_of=index(), chunk=2)
    torch.testing.assert_close(got, token_by_token(**x), **EXACT)


@pytest.mark.parametrize("head_of", [(0, 1, 2, 3), (0, 0, 0, 1), (1, 0, 1, 0)])
def test_each_value_head_reads_the_key_head_it_is_told_to(head_of):
    x = tokens(9, k_heads=1 + max(head_of))
    got = delta_state(**x, head_of=index(head_of), chunk=4)
    torch.testing.assert_close(got, token_by_token(**x, head_of=head_of), **EXACT)


def test_without_an_index_there_is_a_key_head_for_each_value_head():
    x = tokens(9, k_heads=4)
    expected = token_by_token(**x, head_of=(0, 1, 2, 3))
    torch.testing.assert_close(delta_state(**x), expected, **EXACT)


def test_some_of_the_heads_give_the_states_that_all_give():
    x = tokens(9)
    every = delta_state(**x, head_of=index())
    heads = [1, 2]
    some = {name: part[:, :, heads] for name, part in x.items() if name not in ("keys", "state")}
    got = delta_state(**some, keys=x["keys"], state=x["state"][:, heads], head_of=index((0, 1)))
    torch.testing.assert_close(got, every[:, heads], **EXACT)


@given(cut=st.integers(0, 21), chunk=st.sampled_from([1, 5, 8]))
def test_a_sequence_may_be_split_anywhere(cut, chunk):
    x = tokens(21, batch=1)
    whole = delta_state(**x, head_of=index(), chunk=chunk)
    state = x.pop("state")
    for part in (slice(0, cut), slice(cut, None)):
        piece = {name: tensor[:, part] for name, tensor in x.items()}
        state = delta_state(**piece, state=state, head_of=index(), chunk=chunk)
    torch.testing.assert_close(state, whole, **EXACT)


@pytest.mark.parametrize("pads", [(0, 4), (3, 11), (11, 11)])
def test_left_pads_leave_the_state_untouched_whatever_they_hold(pads):
    x = tokens(11)
    valid = torch.arange(11) >= torch.tensor(pads)[:, None]
    expected = token_by_token(**x, valid=valid)
    for name in ("keys", "values", "decay", "beta"):
        x[name][~valid] = float("nan")
    got = delta_state(**x, head_of=index(), valid=valid, chunk=4)
    torch.testing.assert_close(got, expected, **EXACT)


def test_tokens_to_leave_out_may_stand_anywhere():
    x = tokens(13)
    valid = torch.rand(2, 13, generator=torch.Generator().manual_seed(3)) > 0.4
    got = delta_state(**x, head_of=index(), valid=valid, chunk=4)
    torch.testing.assert_close(got, token_by_token(**x, valid=valid), **EXACT)


def test_a_decay_that_forgets_all_within_a_chunk_stays_finite():
    x = tokens(64)
    x["decay"] = torch.full_like(x["decay"], -60.0)
    got = delta_state(**{name: part.float() for name, part in x.items()}, head_of=index())
    torch.testing.assert_close(got.double(), token_by_token(**x), **SINGLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_are_kept_in_float32(dtype):
    x = tokens(5, dtype=dtype)
    assert delta_state(**x, head_of=index()).dtype == torch.float32


@pytest.mark.parametrize("seq", [1, 64, 150])
@pytest.mark.parametrize("start", ["zero", "given"])
def test_the_final_state_is_that_of_transformers(seq, start):
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    x = tokens(seq, dtype=torch.float32)
    if start == "zero":
        x["state"].zero_()
    _, expected = torch_chunk_gated_delta_rule(
        torch.ones_like(x["keys"]), x["keys"], x["values"], g=x["decay"], beta=x["beta"],
        initial_state=None if start == "zero" else x["state"], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(delta_state(**x, head_of=index()), expected, **SINGLE)


def conv_inputs(seq, *, channels=7, kernel=4, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return SimpleNamespace(
        x=normal(2, seq, channels),
        state=normal(2, channels, kernel),
        weight=normal(channels, kernel),
        bias=normal(channels),
    )


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_convolution_is_that_of_transformers_piece_by_piece(with_bias):
    from transformers.cache_utils import LinearAttentionLayer
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, causal_conv1d_update

    made = conv_inputs(20)
    bias = made.bias if with_bias else None
    layer = LinearAttentionLayer()
    state = torch.zeros_like(made.state)
    for start, stop in ((0, 2), (2, 9), (9, 10), (10, 20)):
        x = made.x[:, start:stop].transpose(1, 2)
        if start == 9:
            expected = causal_conv1d_update(x, layer.conv_states[0], made.weight, bias, "silu")
        else:
            full = layer.update_conv_state(x, conv_kernel_size=4)
            expected = causal_conv1d_fn(full, made.weight, bias, activation="silu")
        got, state = causal_conv(made.x[:, start:stop], state, made.weight, bias)
        wanted = expected[..., start - stop :].transpose(1, 2)
        torch.testing.assert_close(got, wanted, **EXACT)
        assert torch.equal(state, layer.conv_states[0])


@pytest.mark.parametrize("pads", [(0, 1), (3, 6), (0, 7)])
def test_left_padded_rows_are_convolved_as_if_they_stood_alone(pads):
    made = conv_inputs(7)
    valid = torch.arange(7) >= torch.tensor(pads)[:, None]
    x = made.x.masked_fill(~valid[:, :, None], float("nan"))
    mixed, state = causal_conv(x, made.state, made.weight, made.bias, valid)
    for row, pad in enumerate(pads):
        if pad == 7:
            assert torch.equal(state[row], made.state[row])
        else:
            alone, stored = causal_conv(
                x[row : row + 1, pad:], made.state[row : row + 1], made.weight, made.bias
            )
            torch.testing.assert_close(mixed[row, pad:], alone[0], **EXACT)
            assert torch.equal(state[row], stored[0])
        assert mixed[row, :pad].abs().sum() == 0


def test_inputs_to_leave_out_may_stand_anywhere():
    made = conv_inputs(9)
    valid = torch.tensor([[True, False, True, True, False, False, True, True, False]] * 2)
    mixed, state = causal_conv(made.x, made.state, made.weight, made.bias, valid)
    alone, stored = causal_conv(made.x[:, valid[0]], made.state, made.weight, made.bias)
    torch.testing.assert_close(mixed[:, valid[0]], alone, **EXACT)
    assert torch.equal(state, stored)


def test_the_stored_inputs_given_are_left_as_they_are():
    made = conv_inputs(3)
    before = made.state.clone()
    _, state = causal_conv(made.x, made.state, made.weight)
    state.zero_()
    assert torch.equal(made.state, before)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_scan_and_convolution_give_a_layers_own_states(tiny_model, name, cache_argument):
    """A layer's input, its frozen weights and these functions give what the model caches."""
    from transformers import DynamicCache

    model = tiny_model(name)
    module = linear_attention_module(model, 1)
    seen = []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    cache = DynamicCache(config=model.config)
    ids = torch.arange(44).view(2, 22) % 90 + 3
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    weights = linear_inputs(module)
    convolved = torch.zeros(2, *weights.conv_weight.shape)
    state = torch.zeros(2, weights.v_heads, weights.k_dim, weights.v_dim)
    with torch.no_grad():
        for start, stop in ((0, 15), (15, 22)):
            model(ids[:, start:stop], attention_mask=mask[:, :stop], **cache_argument(model, cache))
            x, valid = seen[-1], mask[:, start:stop].bool()
            mixed, convolved = causal_conv(
                x @ weights.qkv_weight.T, convolved, weights.conv_weight, weights.conv_bias, valid
            )
            state = delta_state(
                mixed[..., weights.k_channels].unflatten(2, (weights.k_heads, weights.k_dim)),
                mixed[..., weights.v_channels].unflatten(2, (weights.v_heads, weights.v_dim)),
                log_decay(x @ weights.a_weight.T, weights.a_log, weights.dt_bias),
                (x @ weights.b_weight.T).sigmoid(),
                state,
                head_of=torch.tensor(weights.head_of),
                valid=valid,
            )
            layer = cache.layers[1]
            torch.testing.assert_close(state, layer.recurrent_states[0], **SINGLE)
            torch.testing.assert_close(convolved, layer.conv_states[0], **SINGLE)
