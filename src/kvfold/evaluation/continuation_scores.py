"""What given continuations are worth after their prompts, each read as a plan reads prompts.

    score = sum_i log p(x_i | prompt, x_<i) over the continuation's tokens

A prompt runs in one forward and leaves its cache; the continuation then follows on that cache, as
generated tokens would. So a prompt may be skipped, or read exactly and only kept folded: what a
single forward over both would say is then not what decoding sees, or not to be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.errors import EvaluationError
from kvfold.evaluation.continuation import CHUNK
from kvfold.runtime.feeding import cache_argument

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its continuation, at least one of each."""


class Score(NamedTuple):
    """log_probability: of the continuation, in nats. greedy: whether each token is the likeliest"""

    log_probability: float
    greedy: bool


@torch.no_grad()
def continuation_scores(
    model: torch.nn.Module,
    pairs: Sequence[Pair],
    *,
    chunk: int = CHUNK,
    dtype: torch.dtype | None = None,
) -> list[Score]:
    """Score of each pair's continuation; all pairs run as one batch.

    model: a causal model, plain or with an add-on attached. chunk: tokens of the continuation in
    one forward, from `decoding_chunk` for a plan. dtype: of the softmax, the logits' own by
    default. Raises `EvaluationError` for an empty prompt or continuation.

    Prompts are padded on the left. Short continuations are filled up on the right with tokens
    that nothing looks at: no token sees a later one.
    """
    if not pairs or not all(prompt and continuation for prompt, continuation in pairs):
        raise EvaluationError(
            "every pair must have at least one token of prompt and one of continuation; got "
            f"lengths {[(len(p), len(c)) for p, c in pairs]}; leave empty ones out"
        )
    batch = _Batch.of(pairs, torch.device(str(model.device)))
    name = cache_argument(model)
    read = model(
        input_ids=batch.prompts,
        attention_mask=batch.mask,
        position_ids=_positions(batch.mask),
        use_cache=True,
        logits_to_keep=1,
    )
    found = [judged(read.logits[:, -1:], batch.continuations[:, :1], dtype)]
    last = batch.continuations.shape[1] - 1
    for start in range(0, last, chunk):
        stop = min(start + chunk, last)
        new = batch.continuations[:, start:stop]
        mask = torch.cat([batch.mask, torch.ones_like(batch.continuations[:, :stop])], dim=1)
        read = model(
            input_ids=new,
            attention_mask=mask,
            position_ids=_positions(mask)[:, -new.shape[1] :],
            use_cache=True,
            **{name: read[name]},
        )
        found.append(judged(read.logits, batch.continuations[:, start + 1 : stop + 1], dtype))
    chosen = torch.cat([part[0] for part in found], dim=1)
    greedy = torch.cat([part[1] for part in found], dim=1)
    return [
        Score(float(chosen[row, :count].sum()), bool(greedy[row, :count].all()))
        for row, count in enumerate(batch.lengths)
    ]


class _Batch(NamedTuple):
    """Padded pairs. prompts, mask: (batch, most). continuations: (batch, longest)."""

    prompts: Tensor
    mask: Tensor
    continuations: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, pairs: Sequence[Pair], device: torch.device) -> _Batch:
        most = max(len(prompt) for prompt, _ in pairs)
        longest = max(len(continuation) for _, continuation in pairs)
        prompts, mask, continuations = [], [], []
        for prompt, continuation in pairs:
            pads = most - len(prompt)
            prompts.append([0] * pads + list(prompt))
            mask.append([0] * pads + [1] * len(prompt))
            continuations.append(list(continuation) + [0] * (longest - len(continuation)))
        return cls(
            torch.tensor(prompts, device=device),
            torch.tensor(mask, device=device),
            torch.tensor(continuations, device=device),
            [len(continuation) for _, continuation in pairs],
        )


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(dim=1) - 1).clamp_min(0)


def judged(logits: Tensor, targets: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Log-probability of each of some targets (..., seq), and whether it is the likeliest token.

    logits: (..., seq, vocabulary). dtype: of the softmax, the logits' own where None.
    """
    every = logits.log_softmax(-1, dtype=dtype)
    chosen = every.gather(-1, targets[..., None])[..., 0]
    return chosen, every.argmax(dim=-1) == targets
