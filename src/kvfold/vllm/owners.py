"""Modules that own paged memory and attend to nothing: where folded layers keep their rows.

vLLM asks every module in its forward context for the memory it needs and hands it blocks. A model
has few owners, each for all layers together, so that few groups share the pool:

    exact    keys and values of folded layers: anchors and window
    history  packed codes of slots, an owner for each number of tokens a slot
    recent   what is kept of each token until its slot is made (where tokens are pooled)
    whole    keys and values of layers that the plan leaves as they are
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvfold.vllm.pages import Pages
from kvfold.vllm.skip import step_of
from kvfold.vllm.specs import AnchorWindowSpec


@dataclass(frozen=True)
class RowLayout:
    """What an owner keeps: rows of `width` values of a dtype, one for `tokens` tokens.

    window: last tokens whose rows are needed; None: those of all. anchors: first ones that are
    needed besides. tail_only: whether a step's rows are read back in later steps only.
    """

    name: str
    width: int
    dtype: torch.dtype
    tokens: int = 1
    window: int | None = None
    anchors: int = 0
    tail_only: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize


@dataclass
class PagedStep:
    """Where one owner's rows of a step go.

    blocks: (requests, most blocks). slots: (tokens,), the flat place of each new token. starts:
    where each request's tokens begin in the step, and the end of the last. seen: tokens of each
    request after it.
    """

    blocks: Tensor
    slots: Tensor
    starts: list[int]
    seen: list[int]

    @property
    def longest(self) -> int:
        """The most tokens of one request in the step."""
        return max((b - a for a, b in itertools.pairwise(self.starts)), default=0)

    def part(self, first: int, size: int) -> tuple[PagedStep, Tensor]:
        """Of each request the tokens `first` to `first + size - 1` of the step, and their rows."""
        rows: list[int] = []
        starts, seen = [0], []
        for (start, stop), after in zip(itertools.pairwise(self.starts), self.seen, strict=False):
            begin, end = min(start + first, stop), min(start + first + size, stop)
            rows.extend(range(begin, end))
            starts.append(len(rows))
            seen.append(after - (stop - end))
        index = torch.tensor(rows, device=self.slots.device)
        return PagedStep(self.blocks, self.slots[index], starts, seen), index


class _PagedBuilder(AttentionMetadataBuilder):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedStep:
        common = common_attn_metadata
        starts, seen = step_of(common)
        return PagedStep(common.block_table_tensor, common.slot_mapping, starts, seen)


class _PagedBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "KVFOLD_PAGED"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("an owner of rows has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return _PagedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]


class RowOwner(nn.Module, AttentionLayerBase):
    """Paged rows of one layout, known to vLLM by `prefix`."""

    kv_cache: Tensor

    def __init__(self, layout: RowLayout, pages: Pages, prefix: str) -> None:
        super().__init__()
        self.layout = layout
        self.pages = pages
        self.prefix = prefix
        self.kv_cache = torch.tensor([])
        self.part: PagedStep | None = None
        modules = get_current_vllm_config().compilation_config.static_forward_context
        assert prefix not in modules
        modules[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        """A backend that only hands on where rows are."""
        return _PagedBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """The memory that vLLM is asked for."""
        layout = self.layout
        common: dict[str, Any] = {
            "block_size": self.pages.tokens[layout.name],
            "num_kv_heads": 1,
            "head_size": layout.width,
            "dtype": layout.dtype,
            "state_content_bytes": layout.row_bytes,
            "page_size_padded": self.pages.page_bytes,
        }
        if layout.window is None:
            return FullAttentionSpec(tokens_per_state=layout.tokens, **common)
        shared = vllm_config.cache_config.enable_prefix_caching
        tails = vllm_config.max_concurrent_batches if layout.tail_only and not shared else 0
        return AnchorWindowSpec(
            sliding_window=layout.window,
            anchors=layout.anchors,
            tails=tails,
            in_parts=not layout.tail_only,
            **common,
        )

    @property
    def step(self) -> PagedStep | None:
        """Where rows are in the step that runs, or the part of it; None while vLLM only measures
        memory."""
        if self.part is not None:
            return self.part
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata[self.prefix]

    def write(self, places: Tensor, rows: Tensor, columns: slice | None = None) -> None:
        """Store rows (n, width), or some of their columns, at flat places (n,)."""
        per_block = self.kv_cache.shape[2]
        block, inside = places // per_block, places % per_block
        if columns is None:
            columns = slice(0, self.layout.width)
        self.kv_cache[block, 0, inside, columns] = rows.to(self.layout.dtype)

    def read(self, request: int, numbers: Tensor, columns: slice | None = None) -> Tensor:
        """Rows of one request by their numbers (n,) in it: (n, width), or some of the columns."""
        step = self.step
        assert step is not None
        per_block = self.kv_cache.shape[2]
        block = step.blocks[request, numbers // per_block].long()
        if columns is None:
            columns = slice(0, self.layout.width)
        return self.kv_cache[block, 0, numbers % per_block, columns]

    def read_joined(
        self, request: int, numbers: Tensor, columns: slice | None, new: Tensor, before: int
    ) -> Tensor:
        """Rows of one request by ascending numbers (n,): (n, width), those of this step from `new`.

        numbers: on the CPU. new: the request's rows of the step, whose first has number `before`;
        memory may not hold them, see `kvfold.vllm.specs`.
        """
        device = new.device
        earlier = self.read(request, numbers[numbers < before].to(device), columns)
        own = new[(numbers[numbers >= before] - before).to(device)]
        return torch.cat([earlier, own.to(earlier.dtype)])
