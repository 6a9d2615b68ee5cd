"""Perplexity of the tokens that follow a prompt, which the prompt was only read for.

`loss = mean_i -log p(x_i | x_<i)` over the tokens i >= prompt, and none of the prompt's own. This
is what a cache is for, and the one loss that can be told where a prompt has no logits but its
last token's (prefill skipping). The prompt runs in one forward; the rest of the window, but for
its last token, follows on the cache that it has left, as many tokens at a time as see what each
would see alone (`decoding_chunk`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import EvaluationError
from kvfold.evaluation.greedy import read
from kvfold.plan import Plan
from kvfold.runtime.feeding import cache_argument

CHUNK = 32
"""Tokens of the continuation in one forward."""


def one_forward_is_enough(plan: Plan | None) -> bool:
    """Whether one forward over prompt and continuation sees what decoding would; None is plain."""
    return plan is None or (plan.prefill == "full" and plan.prefill_attention == "folded")


def decoding_chunk(plan: Plan | None) -> int:
    """How many tokens of a continuation may run at once so that each sees what decoding would.

    plan: of the add-on that is attached, None for the plain model. Tokens of one call see each
    other exactly where the plan reads prompts so, and are skipped where they are more than its
    replay.
    """
    if plan is None or one_forward_is_enough(plan):
        return CHUNK
    return 1 if plan.prefill_attention == "exact" else min(CHUNK, plan.replay)


@torch.no_grad()
def continuation_loss(
    model: Any, windows: Tensor, prompt: int, *, batch: int = 1, chunk: int = CHUNK
) -> Tensor:
    """Mean loss of each window's tokens after the prompt, in nats: (windows,) float64 on the CPU.

    model: plain, or with an add-on attached. windows: (windows, prompt + continuation) int64,
    without padding. batch: windows in one forward. chunk: tokens of the continuation in one
    forward, at most `decoding_chunk` of the plan. The first token of the continuation is
    scored by the prompt's last logits. Raises `EvaluationError` unless prompt and continuation
    have at least one token, or where a loss is not finite.
    """
    if windows.dim() != 2 or windows.shape[0] == 0 or not 0 < prompt < windows.shape[1]:
        raise EvaluationError(
            "windows must be (windows, prompt + continuation) with at least one token of each; "
            f"got shape {tuple(windows.shape)} with a prompt of {prompt}; use longer windows or a "
            "shorter prompt"
        )
    parts = [
        _loss(model, ids.to(model.device), prompt, chunk) for ids in torch.split(windows, batch)
    ]
    losses = torch.cat(parts)
    if not bool(losses.isfinite().all()):
        raise EvaluationError(
            f"every loss must be finite; got {losses.tolist()}; the model's activations overflow: "
            "load it in float32 or bfloat16, or fit its add-on on more text"
        )
    return losses


def summary(losses: Tensor, base: Tensor | None = None) -> dict[str, Any]:
    """Loss and perplexity over all windows, and each window's loss, as plain data.

    losses, base: (windows,), from `continuation_loss` on the same windows. With the plain model's
    as base also `loss_rise`, the mean of the windows' differences, and its standard error, which
    is far smaller than that of either loss (None for a single window).
    """
    loss = float(losses.mean())
    found = {"loss": loss, "perplexity": math.exp(loss), "losses": losses.tolist()}
    if base is None:
        return found
    rise = losses - base
    error = float(rise.std() / math.sqrt(len(rise))) if len(rise) > 1 else None
    return {**found, "loss_rise": float(rise.mean()), "loss_rise_error": error}


@torch.no_grad()
def continuation_logits(
    model: Any, ids: Tensor, prompt: int, *, chunk: int = CHUNK
) -> Iterator[Tensor]:
    """Logits that tell the tokens from `prompt` on, in order: (batch, some, vocab) at a time.

    model, chunk: as in `continuation_loss`. ids: (batch, seq). The first piece is the prompt's last
    logits. The last token is told, and not fed.
    """
    scores, cache = read(model, ids[:, :prompt])
    yield scores[:, None]
    yield from continued(model, ids[:, prompt:-1], cache, chunk=chunk)


@torch.no_grad()
def continued(model: Any, ids: Tensor, cache: Any, *, chunk: int = CHUNK) -> Iterator[Tensor]:
    """Logits of tokens that follow on a cache, (batch, some, vocab) at a time, `chunk` in each."""
    name = cache_argument(model)
    for start in range(0, ids.shape[1], chunk):
        part = ids[:, start : start + chunk]
        output = model(input_ids=part, use_cache=True, **{name: cache})
        cache = output[name]
        yield output.logits


def _loss(model: Any, ids: Tensor, prompt: int, chunk: int) -> Tensor:
    """(batch,) float64 on the CPU."""
    total = summed_loss(continuation_logits(model, ids, prompt, chunk=chunk), ids[:, prompt:])
    return total.cpu() / (ids.shape[1] - prompt)


def summed_loss(pieces: Iterable[Tensor], targets: Tensor) -> Tensor:
    """Loss of each row, summed over its targets, in nats: (batch,) float64.

    pieces: logits that tell the targets in order, (batch, some, vocab) each. targets: (batch, seq).
    """
    total, at = torch.zeros(len(targets), dtype=torch.float64, device=targets.device), 0
    for scores in pieces:
        told = targets[:, at : at + scores.shape[1]]
        wide = scores if scores.dtype == torch.float64 else scores.float()
        chosen = wide.log_softmax(-1).gather(-1, told[..., None])
        total -= chosen[..., 0].double().sum(dim=1)
        at += scores.shape[1]
    return total
