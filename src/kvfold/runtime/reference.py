"""What a folded layer computes, written out plainly: the yardstick of every fast path.

One dense mask over [exact keys | slots], one softmax. Quadratic in memory, meant for tests and
for the fit's report.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_mask(
    positions: Tensor,
    tokens: int,
    slots: int,
    *,
    anchors: int,
    window: int,
    group: int = 1,
) -> Tensor:
    """Which of [tokens | slots] the queries at some positions see.

    The query at position t (n = t + 1) sees the exact keys of positions up to t that are anchors
    or in [b(t), t], and the slots whose tokens all lie in [A, b(t)). positions: (queries,); the
    result is boolean, (queries, tokens + slots).
    """
    t = positions[:, None]
    end = anchors + group * ((t + 1 - anchors - window).clamp(min=0) // group)
    position = torch.arange(tokens, device=positions.device)[None, :]
    exact = (position <= t) & ((position < anchors) | (position >= end))
    slot_end = anchors + group * (1 + torch.arange(slots, device=positions.device)[None, :])
    return torch.cat([exact, slot_end <= end], dim=1)


def reference_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    *,
    anchors: int,
    window: int,
    group: int = 1,
    scaling: float,
    slot_bias: Tensor | None = None,
) -> Tensor:
    """Attention of rows without padding over anchors, slots and window.

    queries: (batch, heads, queries, head_dim), of the last positions. keys, values:
    (batch, kv_heads, seq, head_dim), exact. slot_keys, slot_values: (batch, kv_heads, slots,
    head_dim), slot g standing for tokens A+r*g to A+r*g+r-1. All post-norm and post-RoPE.
    anchors: A; window: W; group: r; scaling: what logits are multiplied by. slot_bias:
    (heads,), added to the logits of slots. Returns
    (batch, heads, queries, head_dim). See `reference_mask` for who sees what.
    """
    last = torch.arange(keys.shape[2] - queries.shape[2], keys.shape[2], device=queries.device)
    mask = reference_mask(
        last,
        keys.shape[2],
        slot_keys.shape[2],
        anchors=anchors,
        window=window,
        group=group,
    )
    shared_by = queries.shape[1] // keys.shape[1]
    all_keys = torch.cat([keys, slot_keys], dim=2).repeat_interleave(shared_by, dim=1)
    all_values = torch.cat([values, slot_values], dim=2).repeat_interleave(shared_by, dim=1)
    logits = scaling * queries @ all_keys.transpose(2, 3)
    if slot_bias is not None:
        logits[..., keys.shape[2] :] += slot_bias[:, None, None]
    weights = logits.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights @ all_values
