"""An add-on's weights as a fit needs them: wide enough for sums and small steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvfold.anatomy import text_decoder
from kvfold.store.addon import AddOn


def wide_dtype(model: Any) -> torch.dtype:
    """What an add-on's weights are fitted in: float64 for a float64 model, else float32."""
    own = next(text_decoder(model).parameters()).dtype
    return torch.float64 if own == torch.float64 else torch.float32


@contextmanager
def wide(addon: AddOn, model: Any) -> Iterator[None]:
    """The weights in `wide_dtype` on the model's device; in the model's own dtype afterwards."""
    first = next(text_decoder(model).parameters())
    addon.to(first.device, wide_dtype(model))
    try:
        yield
    finally:
        addon.to(first.dtype)
