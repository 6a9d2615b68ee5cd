"""Seeds of draws that must be the same in every run, in any order and in every process."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derived_seed(seed: int, *names: str | int) -> int:
    """A seed of its own, from 0 to 2**63 - 1, for each list of names under one seed."""
    text = "\0".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def drawn_order(count: int, seed: int) -> Tensor:
    """The numbers below `count` in an order that the seed draws: (count,) int64."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
