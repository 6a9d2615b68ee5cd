"""One digest of weights, wherever it must be known that two models or add-ons are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def weights_digest(named: Iterable[tuple[str, Tensor]], *more: str) -> str:
    """SHA-256 of tensors in their order: name, dtype, shape and every byte of each.

    more: what belongs to them beside tensors.
    """
    found = hashlib.sha256()
    for name, tensor in named:
        values = tensor.detach().cpu().contiguous()
        found.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    for text in more:
        found.update(text.encode())
    return found.hexdigest()
