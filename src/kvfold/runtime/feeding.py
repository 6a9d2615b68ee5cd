"""One forward of some new tokens a row: what generating one token after another comes down to."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def cache_argument(model: Any) -> str:
    """What this release of transformers calls the cache argument of a forward."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def last_logits(model: Any, ids: Tensor, cache: Any, seen: Sequence[int]) -> Tensor:
    """Logits after the last new token of each row, (rows, vocabulary).

    ids: (rows, new), no pads. cache: of the model, folded or its own; it takes the tokens in. seen:
    the tokens of each row that are in the cache, whose longest row has a column for every one.
    """
    device = model.device
    before = torch.tensor(list(seen), device=device)[:, None]
    columns = max(seen) + ids.shape[1]
    mask = None
    if len(set(seen)) > 1:
        first = columns - ids.shape[1] - before
        mask = (torch.arange(columns, device=device) >= first).long()
    positions = before + torch.arange(ids.shape[1], device=device)
    output = model(
        input_ids=ids.to(device),
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{cache_argument(model): cache},
    )
    logits: Tensor = output.logits[:, -1]
    return logits
