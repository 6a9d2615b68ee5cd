"""The state of gated linear attention, without its output: what a skipped token leaves behind.

A Gated DeltaNet layer keeps one matrix a head, S of (k_dim, v_dim), and per channel the last
inputs of a short causal convolution. For token t with unit key k_t, value v_t, log decay g_t and
write strength beta_t

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)

(Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"). Prefill skipping needs S and the
convolution's inputs after many tokens, and neither queries nor outputs: half of the work.

`delta_state` takes the tokens in chunks. With G the sum of g from the chunk's start, the chunk's
u solve one unit lower triangular system, and the state goes from chunk to chunk by

    (I + tril(diag(beta) (exp(G_i - G_j) k_i . k_j), -1)) u = diag(beta) (v - exp(G) k^T S)
    S' = exp(G_last) S + sum_j exp(G_last - G_j) k_j u_j^T

(the WY form of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule").
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

KEY_EPSILON = 1e-6
"""What the models add to a key's squared length before they divide by the length."""

CHUNKS_AT_ONCE = 16
"""Chunks that are prepared together: enough to fill a device, few enough to stay small."""


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The log decay of each token and head, `g = -exp(a_log) * softplus(a + dt_bias)`, at most 0.

    a: (..., v_heads), what the layer's decay projection makes of its input; a_log and dt_bias:
    (v_heads,). The result is float32, or float64 if `a` is.
    """
    dtype = _work_dtype(a)
    return -a_log.to(dtype).exp() * functional.softplus(a.to(dtype) + dt_bias.to(dtype))


def delta_state(
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    head_of: Tensor | None = None,
    valid: Tensor | None = None,
    chunk: int = 64,
) -> Tensor:
    """The state after some more tokens; see the module's equations.

    keys: (batch, seq, k_heads, k_dim), after the convolution, any length (they are divided by
    `sqrt(|k|^2 + 1e-6)` here). values: (batch, seq, v_heads, v_dim). decay (g, at most 0) and beta:
    (batch, seq, v_heads). state: (batch, v_heads, k_dim, v_dim), left as it is. head_of: (v_heads,)
    int64, the key head that each value head reads; by default there is one for each. valid:
    (batch, seq) bool, tokens that count; the others, wherever they stand and whatever they hold,
    leave the state untouched. chunk: tokens of one triangular system; the result does not depend
    on it. Result: like `state`, in float32, or float64 if the keys are.
    """
    dtype = _work_dtype(keys)
    state = state.to(dtype)
    block = chunk * CHUNKS_AT_ONCE
    for start in range(0, keys.shape[1], block):
        part = slice(start, start + block)
        k, v, g, b = (
            _chunked(x[:, part].to(dtype), None if valid is None else valid[:, part], chunk)
            for x in (keys, values, decay[..., None], beta[..., None])
        )
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + KEY_EPSILON)
        state = _advance(k, v, g, b, state, head_of)
    return state


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunked(x: Tensor, valid: Tensor | None, chunk: int) -> Tensor:
    """(batch, seq, heads, width) to (batch, heads, chunks, chunk, width).

    What is not valid and what fills up the last chunk is zero: log decay 0, beta 0, key 0.
    """
    if valid is not None:
        x = x.masked_fill(~valid[:, :, None, None], 0)
    x = functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    batch, seq, heads, width = x.shape
    return x.view(batch, seq // chunk, chunk, heads, width).permute(0, 3, 1, 2, 4)


def _advance(
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    head_of: Tensor | None,
) -> Tensor:
    """The state after some chunks; all (batch, heads, chunks, chunk, width), keys of unit length.

    Each chunk's system is solved when its first state is known, with v_dim columns. To solve all
    at once, with k_dim columns more for what multiplies that state, takes a CPU 1.2 to 1.8 times
    as long (chunks of 16 to 128 tokens, 128 values a key and a value).
    """
    products = keys @ keys.transpose(-1, -2)
    if head_of is not None:
        keys, products = keys[:, head_of], products[:, head_of]
    total = decay.cumsum(-2)
    last = total[..., -1:, :]
    # The solver doesn't read the upper triangle; the clamp keeps infinities out of it all the same.
    between = (total - total.transpose(-1, -2)).clamp_(max=0).exp_()
    systems, targets, reads, writes, kept = (
        x.flatten(0, 1).unbind(1)
        for x in (
            products * between * beta,
            values * beta,
            keys * (total.exp() * beta),
            (keys * (last - total).exp()).transpose(-1, -2),
            last.exp(),
        )
    )
    flat = state.flatten(0, 1)
    for index, system in enumerate(systems):
        right = torch.baddbmm(targets[index], reads[index], flat, alpha=-1)
        update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        flat = torch.baddbmm(kept[index] * flat, writes[index], update)
    return flat.view_as(state)


def causal_conv(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution and SiLU of new inputs that follow stored ones.

    `y_t = silu(bias + sum_i weight_i x_{t - kernel + 1 + i})`, channel by channel.

    x: (batch, seq, channels) with seq at least 1. state: (batch, channels, kernel), the inputs
    before x, zeros for what is before the text, as transformers keeps them; left as it is. weight:
    (channels, kernel); bias: (channels,). valid: (batch, seq) bool, tokens that count: a row is
    convolved as if the others were not there, so that stored inputs stand right before its first
    valid token. Results: (batch, seq, channels), zero where not valid, in the dtype of x; and the
    new state, that of a row without a valid token unchanged.
    """
    kernel = weight.shape[-1]
    joined = torch.cat([state, x.transpose(1, 2).to(state.dtype)], dim=-1)
    places = None
    if valid is not None:
        order = _stored_before_valid(valid, kernel)
        joined = joined.gather(2, order[:, None].expand_as(joined))
        places = (order.argsort(dim=-1)[:, kernel:] - kernel).clamp(min=0)
    inputs = joined[..., 1:].to(weight.dtype)
    mixed = functional.silu(
        functional.conv1d(inputs, weight[:, None], bias, groups=weight.shape[0])
    )
    if valid is not None and places is not None:
        mixed = mixed.gather(2, places[:, None].expand_as(mixed)).masked_fill(~valid[:, None], 0)
    return mixed.transpose(1, 2).to(x.dtype), joined[..., -kernel:].clone()


def _stored_before_valid(valid: Tensor, kernel: int) -> Tensor:
    """The order (batch, kernel + seq) that puts invalid inputs first, then stored, then valid."""
    last = torch.cat([valid.new_ones(valid.shape[0], kernel), valid], dim=-1)
    return last.to(torch.int8).argsort(dim=-1, stable=True)
