"""What a layer's queries, keys and values are handed to in place of vLLM's attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)

from kvfold.anatomy import LayerAnatomy
from kvfold.methods.base import AffineMap
from kvfold.runtime.absorbing import absorbing_pays, affine_maps, stored_map
from kvfold.runtime.schedule import Schedule
from kvfold.vllm.attend import ExactRows, Slots, attend, exact_positions
from kvfold.vllm.heads import LocalHeads
from kvfold.vllm.owners import RowOwner
from kvfold.vllm.slot_readers import AbsorbingReader, SlotReader

if TYPE_CHECKING:
    from kvfold.vllm.fold import Folding


class FoldedAttention(nn.Module):
    """Attention of one layer over its own rows and its code's slots, request by request.

    folded: whether the plan names the layer; others see all tokens, from rows of their own.
    """

    def __init__(
        self,
        folding: Folding,
        layer: LayerAnatomy,
        attention: Any,
        local: LocalHeads,
        columns: slice,
        *,
        folded: bool,
    ) -> None:
        super().__init__()
        self.index = layer.index
        self.local = local
        self.columns = columns
        self.folded = folded
        self.scaling = float(attention.scaling)
        self.has_k_norm = layer.k_norm != "none"
        self.kv_replicas = max(
            1,
            get_tensor_model_parallel_world_size()
            * attention.num_kv_heads
            // attention.total_num_kv_heads,
        )
        plan = folding.loaded.plan
        group = plan.group_of(layer.index)
        self.schedule = Schedule(plan.anchors, plan.window, group) if folded else None
        self._key_map: AffineMap | None = None
        # Not as submodules: this module hangs below both.
        self.__dict__["folding"] = folding
        self.__dict__["parent"] = attention

    def attention(self) -> Any:
        """vLLM's module that projects for this layer."""
        return self.__dict__["parent"]

    def gathered(self, flat: Tensor) -> Tensor:
        """All devices' kv heads: (n, kv_width here) to (n, kv_width of the layer)."""
        if get_tensor_model_parallel_world_size() == 1:
            return flat
        every: Tensor = tensor_model_parallel_all_gather(flat.contiguous(), dim=-1)
        if self.kv_replicas == 1:
            return every
        by_device = every.view(len(flat), -1, self.local.kv_width)
        return by_device[:, :: self.kv_replicas].flatten(1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attention output (tokens, heads * head_dim) of post-RoPE queries and keys."""
        folding: Folding = self.__dict__["folding"]
        owner = folding.owners["exact" if self.folded else "whole"]
        step = owner.step
        output = torch.zeros_like(query)
        if step is None:
            return output
        count, local = step.starts[-1], self.local
        rows = torch.cat([key[:count].flatten(1), value[:count].flatten(1)], dim=-1)
        owner.write(step.slots[:count], rows, self.columns)
        queries = query[:count].view(count, local.heads, local.head_dim)
        for request, after in enumerate(step.seen):
            start, stop = step.starts[request], step.starts[request + 1]
            if stop > start:
                part = slice(start, stop)
                made = self._attend(folding, owner, request, queries[part], rows[part], after)
                output[start:stop] = made.flatten(1).to(output.dtype)
        return output

    def _attend(
        self,
        folding: Folding,
        owner: RowOwner,
        request: int,
        queries: Tensor,
        new: Tensor,
        after: int,
    ) -> Tensor:
        local, before = self.local, after - len(queries)
        device = queries.device
        held = exact_positions(self.schedule, before, after)
        rows = owner.read_joined(request, held, self.columns, new, before)
        keys, values = rows.view(len(held), 2, local.kv_heads, local.head_dim).permute(1, 2, 0, 3)
        return attend(
            queries,
            torch.arange(before, after, device=device),
            ExactRows(keys, values, held.to(device)),
            self.scaling,
            self.schedule,
            self._slots(folding, request, len(queries), after) if self.folded else None,
        )

    def _slots(self, folding: Folding, request: int, new: int, after: int) -> Slots | None:
        code = folding.code_of(self.index)
        if code is None:
            return None
        visible = code.schedule.slots(after)
        bias = code.pipeline.slot_bias(self.index)
        if bias is not None:
            bias = bias[self.local.first_head : self.local.first_head + self.local.heads]
        keys, values = affine_maps(code.pipeline.depth, self.index)
        local = self.local
        if (
            keys is None
            or values is None
            or not absorbing_pays(
                heads=local.heads,
                kv_heads=local.kv_heads,
                head_dim=local.head_dim,
                code_width=code.pipeline.depth.code_width,
                queries=new,
                slots=visible,
            )
        ):
            return Slots(visible, SlotReader(folding, code, self, request), bias)
        if self._key_map is None:
            quantised = code.pipeline.bits is not None
            self._key_map = stored_map(code.pipeline, keys) if quantised else keys
        reader = AbsorbingReader(folding, code, self, request, self._key_map, values)
        return Slots(visible, reader, bias, reader.values)
