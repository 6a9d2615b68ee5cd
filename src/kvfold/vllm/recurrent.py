"""Gated DeltaNet layers of a vLLM model: their states, and their part in passes over some rows.

They run vLLM's own kernels, and its pool holds their states: one block a request and layer, or
with prefix caching one more for each boundary at which prompts may share what they begin with.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.utils.math_utils import round_up

from kvfold.vllm.passes import repeatable_backend
from kvfold.vllm.skip import KeptRows, step_of

PAGE_UNIT = 64
"""Pages are multiples of so many bytes: rows of any dtype begin at whole values."""


class RecurrentLayers:
    """Some Gated DeltaNet modules, by layer, with a backend that can make its metadata anew."""

    def __init__(self, modules: dict[int, Any]) -> None:
        self.modules = modules
        self.names = [module.prefix for module in modules.values()]
        for module in modules.values():
            backend = repeatable_backend(module.get_attn_backend())
            module.get_attn_backend = functools.partial(_given, backend)

    @classmethod
    def of(cls, decoder: Any, layers: Sequence[Any]) -> RecurrentLayers:
        """Those of a decoder among some layers, given by their anatomy."""
        indices = [layer.index for layer in layers if layer.kind == "linear_attention"]
        return cls({index: decoder.layers[index].linear_attn for index in indices})

    def state_bytes(self, vllm_config: Any) -> int:
        """Bytes of one layer's state; 0 without layers."""
        if not self.modules:
            return 0
        spec = next(iter(self.modules.values())).get_kv_cache_spec(vllm_config)
        return int(round_up(spec.real_page_size_bytes, PAGE_UNIT))

    def share_pages(self, page_bytes: int, period: int) -> None:
        """Ask vLLM for pages of another size, and for states to share at multiples of `period`."""
        for module in self.modules.values():
            stock = module.get_kv_cache_spec
            module.get_kv_cache_spec = functools.partial(_paged_spec, stock, page_bytes, period)

    def step(self, context: Any) -> tuple[list[int], list[int]]:
        """Where each request's rows begin in the step, and its tokens after it."""
        return step_of(context.attn_metadata[self.names[0]].kvfold_step.common)

    def states(self, context: Any, index: int, request: int) -> RecurrentState:
        """One request's state in one layer."""
        module = self.modules[index]
        metadata = context.attn_metadata[module.prefix]
        place = int(metadata.non_spec_state_indices_tensor[request])
        convolved, state = (held[place] for held in module.kv_cache)
        return RecurrentState(convolved, state)

    def clear(self, context: Any, requests: Sequence[int]) -> None:
        """Let some requests' states be as at the beginning of a text."""
        if not requests:
            return
        for module in self.modules.values():
            metadata = context.attn_metadata[module.prefix]
            places = metadata.non_spec_state_indices_tensor[list(requests)].long()
            for held in module.kv_cache:
                held[places] = 0


@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """One request's state as vLLM keeps it, to read and write as kvfold does."""

    convolved: Tensor
    state: Tensor

    def read(self, kernel: int) -> tuple[Tensor, Tensor]:
        """The convolution's last inputs (1, channels, kernel), and (1, v_heads, k_dim, v_dim)."""
        held = self._by_channel()
        inputs = torch.nn.functional.pad(held, (kernel - held.shape[-1], 0))
        return inputs[None], self._by_key()[None].clone()

    def clear(self) -> None:
        """Be as at the beginning of a text."""
        self.convolved.zero_()
        self.state.zero_()

    def write(self, convolved: Tensor, state: Tensor) -> None:
        """Take what `read` gave, changed."""
        held = self._by_channel()
        held.copy_(convolved[0, :, -held.shape[-1] :])
        self._by_key().copy_(state[0])

    def _by_channel(self) -> Tensor:
        """(channels, kernel - 1), a view."""
        return self.convolved if is_conv_state_dim_first() else self.convolved.transpose(0, 1)

    def _by_key(self) -> Tensor:
        """(v_heads, k_dim, v_dim), a view. The CPU's kernels keep keys first, others values."""
        if current_platform.is_cpu():
            heads, v_dim, k_dim = self.state.shape
            return self.state.view(heads, k_dim, v_dim)
        return self.state.transpose(1, 2)


def _given(backend: Any) -> Any:
    return backend


def _paged_spec(stock: Any, page_bytes: int, period: int, vllm_config: Any) -> Any:
    """A layer's memory, on pages of another size."""
    spec = stock(vllm_config)
    changes: dict[str, Any] = {"page_size_padded": page_bytes}
    if spec.mamba_cache_mode == "align":
        changes["block_size"] = vllm_config.cache_config.mamba_block_size = period
    return dataclasses.replace(spec, **changes)


def part_of_step(starts: list[int], seen: list[int], first: int, size: int) -> KeptRows:
    """Of each request the tokens `first` to `first + size - 1` of the step, where it has any."""
    rows, lengths, requests, ends = [], [], [], []
    for request, after in enumerate(seen):
        begin, end = (min(starts[request] + n, starts[request + 1]) for n in (first, first + size))
        if end > begin:
            rows.append(torch.arange(begin, end))
            lengths.append(end - begin)
            requests.append(request)
            ends.append(after - (starts[request + 1] - end))
    return KeptRows(torch.cat(rows), lengths, requests, ends)
