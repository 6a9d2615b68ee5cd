"""Prefill skipping in a vLLM model: most of a prompt's rows leave only their history above.

All rows run through the layers below the split. What the layers from there on would have kept of
them is made of the hidden state at the split, by the add-on's depth methods, and written to their
ordinary blocks; then the kept rows (see `kvfold.vllm.skip`) run through those layers and write
their own keys and values over it. Layers keep vLLM's own attention.

Tokens that ran stay exact for good, where kvfold's own runtime folds them as they leave the
window: as if the window were as long as what has run. Each chunk of a prompt keeps its own last
`replay` rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context

from kvfold.methods import Source
from kvfold.vllm.heads import LocalHeads
from kvfold.vllm.settings import Loaded
from kvfold.vllm.skip import trimmed_backend


class Skipping:
    """The layers that prompts skip; what a decoder holds as `kvfold`.

    rows_run, rows_left_out: through the upper layers, since the start.
    """

    def __init__(self, decoder: Any, loaded: Loaded) -> None:
        self.loaded = loaded
        plan = loaded.plan
        assert plan.split is not None
        self.split: int = plan.split
        self.lower = list(decoder.layers)[: self.split]
        self.upper = list(decoder.layers)[self.split :]
        self.attending = [
            (layer.index, decoder.layers[layer.index].self_attn)
            for layer in loaded.addon.base.anatomy.layers[self.split :]
            if layer.kind == "full_attention"
        ]
        self.k_norms = {n.index: n.k_norm != "none" for n in loaded.addon.base.anatomy.layers}
        for _, attention in self.attending:
            stock = attention.attn.attn_backend
            attention.attn.attn_backend = trimmed_backend(stock, plan.replay, plan.anchors)
        self.rows_run = self.rows_left_out = 0

    def forward(self, decoder: Any, hidden: Tensor, positions: Tensor) -> Tensor:
        """The decoder's output; rows that were left out are NaN, since they have none."""
        residual: Tensor | None = None
        for layer in self.lower:
            hidden, residual = layer(positions, hidden, residual)
        context = get_forward_context()
        rows = self._kept(context)
        if rows is None:
            self.rows_run += len(hidden)
            return self._run_upper(decoder, positions, hidden, residual)
        assert residual is not None
        self._write_history(context, hidden + residual, positions)
        slots = {
            attention.attn.layer_name: context.slot_mapping[attention.attn.layer_name][rows]
            for _, attention in self.attending
        }
        with override_forward_context(dataclasses.replace(context, slot_mapping=slots)):
            kept = self._run_upper(decoder, positions[..., rows], hidden[rows], residual[rows])
        self.rows_run += len(rows)
        self.rows_left_out += len(hidden) - len(rows)
        output = torch.full_like(hidden, torch.nan)
        return output.index_copy_(0, rows, kept)

    def _kept(self, context: Any) -> Tensor | None:
        if not isinstance(context.attn_metadata, dict):
            return None
        name = self.attending[0][1].attn.layer_name
        rows: Tensor | None = context.attn_metadata[name].kvfold_rows
        return rows

    def _run_upper(
        self, decoder: Any, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> Tensor:
        for layer in self.upper:
            hidden, residual = layer(positions, hidden, residual)
        output: Tensor = decoder.norm(hidden, residual)[0]
        return output

    def _write_history(self, context: Any, hidden: Tensor, positions: Tensor) -> None:
        """Keys and values of all rows, regenerated from the hidden state at the split."""
        activations = {Source("hidden", self.split): hidden[None]}
        for pipeline in self.loaded.pipelines:
            code = pipeline.depth.encode(activations)
            for index, attention in self.attending:
                if index in pipeline.layers:
                    pair = pipeline.depth.decode(index, code)
                    self._write(context, index, attention, positions, *(x[0] for x in pair))

    def _write(
        self,
        context: Any,
        index: int,
        attention: Any,
        positions: Tensor,
        flat_keys: Tensor,
        flat_values: Tensor,
    ) -> None:
        local, attn = LocalHeads.of(attention), attention.attn
        keys = local.own(flat_keys).transpose(0, 1).contiguous()
        if self.k_norms[index]:
            keys = attention.k_norm(keys)
        flat = keys.reshape(len(keys), -1)
        # vLLM turns queries and keys in one call; there are no queries here.
        no_queries = flat.new_zeros(len(flat), local.heads * local.head_dim)
        _, turned = attention.rotary_emb(positions, no_queries, flat)
        attn.impl.do_kv_cache_update(
            attn,
            turned.view(keys.shape),
            local.own(flat_values).transpose(0, 1).contiguous(),
            attn.kv_cache,
            context.slot_mapping[attn.layer_name],
        )
