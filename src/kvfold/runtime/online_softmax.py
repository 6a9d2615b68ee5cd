"""Softmax over keys that come in blocks, so that no row of logits ever exists as a whole."""

from __future__ import annotations

import torch
from torch import Tensor


class StreamingSoftmax:
    """Softmax over keys that come in blocks: running maximum, sum and weighted sums.

    queries: (batch, kv_heads, grouped, head_dim) where `grouped` runs over the query heads of a
    kv head and their queries. Sums are kept in at least float32.
    """

    def __init__(self, batch: int, kv_heads: int, grouped: int, like: Tensor) -> None:
        self.dtype = torch.float32 if like.element_size() < 4 else like.dtype
        shape = (batch, kv_heads, grouped, 1)
        self.maximum = torch.full(shape, -torch.inf, dtype=self.dtype, device=like.device)
        self.total = torch.zeros(shape, dtype=self.dtype, device=like.device)
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, logits: Tensor, mask: Tensor, values: Tensor) -> None:
        """Add a block to the sum called `name`.

        logits: (batch, kv_heads, grouped, block), scaled; mask: the same, or broadcast to it,
        true where seen; values: (batch, kv_heads or 1, block, width).
        """
        logits = logits.to(self.dtype).masked_fill(~mask, -torch.inf)
        highest = torch.maximum(self.maximum, logits.amax(-1, keepdim=True))
        anchor = highest.masked_fill(highest == -torch.inf, 0.0)
        shrink = torch.exp(self.maximum - anchor)
        weights = torch.exp(logits - anchor)
        self.total = self.total * shrink + weights.sum(-1, keepdim=True)
        self.sums = {key: value * shrink for key, value in self.sums.items()}
        added = torch.matmul(weights, values.to(self.dtype))
        self.sums[name] = self.sums[name] + added if name in self.sums else added
        self.maximum = highest
