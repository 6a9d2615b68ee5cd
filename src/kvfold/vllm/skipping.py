"""Prefill skipping in a vLLM model: most of a prompt's rows leave only their history above.

All rows run through the layers below the split. What the layers from there on would have kept of
them is made of the hidden state at the split, by the add-on's depth methods, and written to their
ordinary blocks; then the kept rows (see `kvfold.vllm.skip`) run through those layers and write
their own keys and values over it. Layers keep vLLM's own attention. Where they have recurrent
states as well, `kvfold.vllm.replay` says how rows run.

Tokens that ran stay exact for good, where kvfold's own runtime folds them as they leave the
window: as if the window were as long as what has run. Each chunk of a prompt keeps its own last
`replay` rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context

from kvfold.methods import Source
from kvfold.vllm.heads import LocalHeads
from kvfold.vllm.replay import ReplayPasses
from kvfold.vllm.settings import Loaded
from kvfold.vllm.skip import trimmed_backend


class Passes(Protocol):
    """How kept rows run through the upper layers."""

    def weights_loaded(self) -> None:
        """Told when the model has its weights."""

    def of(self, context: Any, hidden: Tensor) -> Iterable[tuple[Tensor, Any]] | None:
        """Rows that run together, and the forward context for them; None if all rows are kept.

        hidden: the hidden state at the split, (tokens, hidden).
        """


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
        attending = [attention.attn for _, attention in self.attending]
        self.passes: Passes
        if loaded.addon.base.anatomy.is_hybrid:
            self.passes = ReplayPasses(decoder, loaded, attending)
        else:
            self.passes = OnePass(loaded, attending)
        self.rows_run = self.rows_left_out = 0

    def forward(self, decoder: Any, hidden: Tensor, positions: Tensor) -> Tensor:
        """The decoder's output; rows that were left out are NaN, since they have none."""
        residual: Tensor | None = None
        for layer in self.lower:
            hidden, residual = layer(positions=positions, hidden_states=hidden, residual=residual)
        context = get_forward_context()
        at_split = hidden if residual is None else hidden + residual
        passes = self.passes.of(context, at_split)
        if passes is None:
            self.rows_run += len(hidden)
            return self._run_upper(decoder, positions, hidden, residual)
        assert residual is not None
        self._write_history(context, at_split, positions)
        output = torch.full_like(hidden, torch.nan)
        self.rows_left_out += len(hidden)
        for rows, inside in passes:
            with override_forward_context(inside):
                kept = self._run_upper(decoder, positions[..., rows], hidden[rows], residual[rows])
            output.index_copy_(0, rows, kept)
            self.rows_run += len(rows)
            self.rows_left_out -= len(rows)
        return output

    def _run_upper(
        self, decoder: Any, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> Tensor:
        for layer in self.upper:
            hidden, residual = layer(positions=positions, hidden_states=hidden, residual=residual)
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


class OnePass:
    """Layers that only attend: all kept rows at once, by metadata that is trimmed as it is made."""

    def __init__(self, loaded: Loaded, attending: Sequence[Any]) -> None:
        self.names = [attention.layer_name for attention in attending]
        for attention in attending:
            attention.attn_backend = trimmed_backend(
                attention.attn_backend, loaded.plan.replay, loaded.plan.anchors
            )

    def weights_loaded(self) -> None:
        """Nothing is needed of them."""

    def of(self, context: Any, hidden: Tensor) -> list[tuple[Tensor, Any]] | None:
        """See `Passes`."""
        if not isinstance(context.attn_metadata, dict):
            return None
        rows: Tensor | None = context.attn_metadata[self.names[0]].kvfold_rows
        if rows is None:
            return None
        slots = {name: context.slot_mapping[name][rows] for name in self.names}
        return [(rows, dataclasses.replace(context, slot_mapping=slots))]
