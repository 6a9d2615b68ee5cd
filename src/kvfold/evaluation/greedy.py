"""Greedy decoding by hand: a prompt is read into a cache, and what the model says comes out of it.

`generate` wants the whole prompt again for every call. Where a conversation goes on, or two texts
are to come from one prompt, the cache itself has to be kept, copied and passed on, so the tasks
that need no sampling use these few lines instead, all alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from kvfold.runtime.feeding import cache_argument


@torch.no_grad()
def read(model: Any, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
    """Feed tokens, without padding, to a cache; returns the last one's logits and the cache.

    model: plain, or with an add-on attached. ids: (batch, seq) int64. cache: None for a new one,
    folded if an add-on is attached. The logits are (batch, vocab).
    """
    name = cache_argument(model)
    given = {} if cache is None else {name: cache}
    output = model(input_ids=ids.to(model.device), use_cache=True, logits_to_keep=1, **given)
    return output.logits[:, -1], output[name]


@torch.no_grad()
def speak(model: Any, scores: Tensor, cache: Any, count: int, ends: Collection[int] = ()) -> Tensor:
    """At most `count` greedy tokens from what `read` returned: (batch, made) int64 on the CPU.

    ends: tokens that end a row; once every row has one nothing more is made. A row goes on beyond
    its own end (cut it with `before_end`). The cache takes in every token but the last.
    """
    made = [scores.argmax(dim=-1)]
    ended = torch.zeros(len(scores), dtype=torch.bool)
    while len(made) < count:
        ended |= torch.tensor([token in ends for token in made[-1].tolist()])
        if bool(ended.all()):
            break
        scores, cache = read(model, made[-1][:, None], cache)
        made.append(scores.argmax(dim=-1))
    return torch.stack(made, dim=1).cpu()


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens at which the model's own generation settings end a text."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def before_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens before the first that ends a text."""
    return next((tokens[:n] for n, token in enumerate(tokens) if token in ends), tokens)


def says(model: Any, prompts: list[list[int]], tokenizer: Any, count: int) -> list[str]:
    """What the model goes on with after each prompt, at most `count` tokens of it, as text.

    prompts: token ids, equally many each.
    """
    ends = end_tokens(model)
    scores, cache = read(model, torch.tensor(prompts))
    rows = speak(model, scores, cache, count, ends).tolist()
    return [tokenizer.decode(before_end(row, ends), skip_special_tokens=True) for row in rows]


def begins_with(text: str, answer: str) -> bool:
    """Whether a text begins with an answer, after blanks, and not with a longer word."""
    return re.match(rf"\s*{re.escape(answer)}(?!\w)", text) is not None
