"""Attention of one request's new tokens over its exact rows and its slots, in one softmax.

The masks are those of `kvfold.runtime.schedule`, the sum that of `kvfold.runtime.online_softmax`;
keys and values of slots come block by block, so that the whole history never exists at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.runtime.online_softmax import StreamingSoftmax
from kvfold.runtime.schedule import Schedule

BLOCK = 1024
"""Keys whose logits exist at once."""
ABSORBED = "absorbed"


class KeysValues(NamedTuple):
    """Both (kv_heads, count, head_dim), post-norm and post-RoPE; absorbed values are codes."""

    keys: Tensor
    values: Tensor


class ExactRows(NamedTuple):
    """Keys and values of tokens, and the tokens' positions (count,)."""

    keys: Tensor
    values: Tensor
    positions: Tensor


class Slots(NamedTuple):
    """A history: how many slots are visible, what reads a range of them, and the logits' bias.

    bias: (heads,), or None. absorbed: what turns weighted sums (kv_heads, grouped, width) of what
    `read` gives for values, (kv_heads or 1, count, width), into sums of values; None where it gives
    values.
    """

    visible: int
    read: Callable[[range], KeysValues]
    bias: Tensor | None
    absorbed: Callable[[Tensor], Tensor] | None = None


def exact_positions(schedule: Schedule | None, before: int, after: int) -> Tensor:
    """Positions whose exact rows some new token sees: all without a schedule."""
    if schedule is None:
        return torch.arange(after)
    first = max(schedule.folded_until(before + 1), schedule.anchors)
    anchors = torch.arange(min(schedule.anchors, after))
    return torch.cat([anchors, torch.arange(min(first, after), after)])


def attend(
    queries: Tensor,
    positions: Tensor,
    exact: ExactRows,
    scaling: float,
    schedule: Schedule | None = None,
    slots: Slots | None = None,
) -> Tensor:
    """Attention output: (new, heads, head_dim).

    queries: (new, heads, head_dim), post-RoPE, at positions (new,). exact: rows that some of them
    sees. schedule: who sees what; None: every token all before it. scaling: of logits.
    """
    new, heads, width = queries.shape
    kv_heads = exact.keys.shape[0]
    repeat = heads // kv_heads
    grouped = queries.view(new, kv_heads, repeat, width).permute(1, 2, 0, 3)
    grouped = grouped.reshape(1, kv_heads, repeat * new, width)
    state = StreamingSoftmax(1, kv_heads, repeat * new, queries)
    horizon = torch.zeros_like(positions)
    if schedule is not None:
        horizon = schedule.folded_until_each(positions + 1)
    anchors = 0 if schedule is None else schedule.anchors
    for start in range(0, len(exact.positions), BLOCK):
        block = slice(start, start + BLOCK)
        held = exact.positions[None, block]
        seen = (held <= positions[:, None]) & ((held < anchors) | (held >= horizon[:, None]))
        pair = KeysValues(exact.keys[:, block], exact.values[:, block])
        _add(state, "values", grouped, pair, seen.repeat(repeat, 1), scaling, None)
    if slots is not None:
        assert schedule is not None
        bias = None
        if slots.bias is not None:
            bias = slots.bias.view(1, kv_heads, repeat, 1).expand(-1, -1, -1, new)
            bias = bias.reshape(1, kv_heads, repeat * new, 1)
        for start in range(0, slots.visible, BLOCK):
            numbers = range(start, min(start + BLOCK, slots.visible))
            last = torch.arange(numbers.start + 1, numbers.stop + 1)
            ends = schedule.anchors + schedule.group * last.to(positions.device)
            seen = ends[None] <= horizon[:, None]
            name = "values" if slots.absorbed is None else ABSORBED
            _add(state, name, grouped, slots.read(numbers), seen.repeat(repeat, 1), scaling, bias)
    output = state.sums.get("values")  # none where all that is seen is absorbed
    if ABSORBED in state.sums:
        assert slots is not None and slots.absorbed is not None
        absorbed = slots.absorbed(state.sums[ABSORBED][0])
        output = absorbed if output is None else output + absorbed
    assert output is not None
    output = output / state.total
    return output.view(kv_heads, repeat, new, width).permute(2, 0, 1, 3).reshape(queries.shape)


def _add(
    state: StreamingSoftmax,
    name: str,
    grouped: Tensor,
    pair: KeysValues,
    seen: Tensor,
    scaling: float,
    bias: Tensor | None,
) -> None:
    logits = torch.matmul(grouped, pair.keys[None].transpose(2, 3)) * scaling
    if bias is not None:
        logits = logits + bias
    state.add(name, logits, seen[None, None], pair.values[None])
