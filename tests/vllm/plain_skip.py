"""Prefill skipping on vLLM in plain tensors, step by step of one text.

What ran through the upper layers stays exact there, and each step keeps its own last `replay` rows:
so what an answer reads depends on how a prompt was cut into steps. This runs the steps that it is
told, with whole keys and values of every row, and nothing of vLLM or of kvfold's runtime.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.methods import Source


class Rows(DynamicCache):
    """Whole keys and values of layers that attend, each row where it belongs; states as usual.

    rows: of what runs now.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.held: dict[int, Tensor] = {}
        self.rows = range(0)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Put rows in their place, over what was there; returns all rows up to the last of them."""
        new = torch.stack([keys, values])
        old = self.held.get(layer_idx, new[..., :0, :])
        missing = max(0, self.rows.stop - old.shape[-2])
        held = torch.cat([old, new.new_zeros(*new.shape[:-2], missing, new.shape[-1])], dim=-2)
        held[..., self.rows.start : self.rows.stop, :] = new
        self.held[layer_idx] = held
        return held[0, ..., : self.rows.stop, :], held[1, ..., : self.rows.stop, :]


class SkippedText:
    """One text of a Llama, Qwen3 or Qwen3.5 model under an add-on whose plan skips.

    seen: tokens that have run. left_out: rows that did not run through the upper layers.
    """

    def __init__(self, model: Any, addon: Any, plan: Any) -> None:
        self.model, self.plan = model, plan
        self.decoder = model.model
        self.pipelines = addon.pipelines
        self.cache = Rows(model.config)
        self.seen = self.left_out = 0

    def beginning(self, count: int) -> SkippedText:
        """The first rows as they are now, for another text; of models that only attend."""
        other = copy.copy(self)
        other.cache = Rows(self.model.config)
        other.cache.held = {n: held[..., :count, :] for n, held in self.cache.held.items()}
        other.seen, other.left_out = count, 0
        return other

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """One step; logits after its last token."""
        rows = range(self.seen, self.seen + len(tokens))
        self.seen = rows.stop
        hidden = self.decoder.embed_tokens(torch.tensor([list(tokens)]))
        split, layers = self.plan.split, range(self.model.config.num_hidden_layers)
        hidden = self._run(layers[:split], hidden, rows)
        anchors = range(rows.start, max(rows.start, min(self.plan.anchors, rows.stop)))
        if len(rows) > self.plan.replay + len(anchors):
            self._write_projected(hidden, rows)
            if anchors:
                self._clear_states(layers[split:])
                self._run(layers[split:], hidden[:, : len(anchors)], anchors)
            self._clear_states(layers[split:])
            self.left_out += len(rows) - self.plan.replay - len(anchors)
            rows, hidden = rows[-self.plan.replay :], hidden[:, -self.plan.replay :]
        last = self._run(layers[split:], hidden, rows)[:, -1:]
        return self.model.lm_head(self.decoder.norm(last))[0, -1]

    def _run(self, layers: range, hidden: Tensor, rows: range) -> Tensor:
        positions = torch.tensor(rows)
        self.cache.rows = rows
        turning = self.decoder.rotary_emb(hidden, positions[None])
        mask = (torch.arange(rows.stop) <= positions[:, None])[None, None]
        for layer in (self.decoder.layers[n] for n in layers):
            attends = hasattr(layer, "self_attn")
            hidden = layer(
                hidden,
                attention_mask=mask if attends else None,
                past_key_values=self.cache,
                position_embeddings=turning,
            )
        return hidden

    def _write_projected(self, hidden: Tensor, rows: range) -> None:
        cosine, sine = self.decoder.rotary_emb(hidden, torch.tensor(rows)[None])
        self.cache.rows = rows
        for pipeline in self.pipelines:
            code = pipeline.depth.encode({Source("hidden", self.plan.split): hidden})
            for layer in pipeline.layers:
                attention = self.decoder.layers[layer].self_attn
                by_head = (1, len(rows), -1, attention.head_dim)
                keys, values = (x.view(by_head) for x in pipeline.depth.decode(layer, code))
                keys = getattr(attention, "k_norm", torch.nn.Identity())(keys).transpose(1, 2)
                self.cache.update(_turned(keys, cosine, sine), values.transpose(1, 2), layer)

    def _clear_states(self, layers: range) -> None:
        fresh = Rows(self.model.config)
        for n in layers:
            if not hasattr(self.decoder.layers[n], "self_attn"):
                self.cache.layers[n] = fresh.layers[n]


def _turned(keys: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    width = cosine.shape[-1]
    turning, rest = keys[..., :width], keys[..., width:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cosine[:, None] + torch.cat([-second, first], dim=-1) * sine[:, None]
    return torch.cat([turned, rest], dim=-1)
