"""Which heads of a layer are on this device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)


@dataclass(frozen=True)
class LocalHeads:
    """Heads of one layer on this device, and how to find them among all."""

    heads: int
    kv_heads: int
    head_dim: int
    first_head: int
    first_kv_head: int

    @classmethod
    def of(cls, attention: Any) -> LocalHeads:
        """Of a vLLM attention module."""
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        return cls(
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            first_head=rank * attention.num_heads,
            first_kv_head=rank * attention.total_num_kv_heads // size,
        )

    @property
    def kv_width(self) -> int:
        """Values of one token's keys here."""
        return self.kv_heads * self.head_dim

    def own(self, flat: Tensor) -> Tensor:
        """All heads' values (n, width) to this device's: (kv_heads, n, head_dim)."""
        by_head = flat.view(len(flat), -1, self.head_dim)
        stop = self.first_kv_head + self.kv_heads
        return by_head[:, self.first_kv_head : stop].transpose(0, 1)
