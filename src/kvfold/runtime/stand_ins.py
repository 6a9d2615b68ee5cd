"""The forwards that stand in for those of an attached model's modules, but for its decoder's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.methods import Source
from kvfold.runtime.attention import attend
from kvfold.runtime.layer import FoldedAttention, NewTokens

if TYPE_CHECKING:
    from kvfold.runtime.attach import Attachment


def attention_forward(attachment: Attachment, fold: FoldedAttention) -> Any:
    """The forward that stands in for a folded layer's attention module."""
    own = {kind: Source(kind, fold.index) for kind in ("inputs", "keys", "values")}
    wanted = {kind for kind, source in own.items() if attachment.is_wanted(source)}

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert position_embeddings is not None
        made = fold.family.project(fold.module, hidden_states)
        found = {"inputs": hidden_states} if "inputs" in wanted else {}
        found |= {
            kind: _flat(part)
            for kind, part in (("keys", made.keys), ("values", made.values))
            if kind in wanted
        }
        attachment.publish({own[kind]: part for kind, part in found.items()})
        cache = attachment.cache
        assert cache is not None
        rotation = attachment.own_rotation(position_embeddings)
        new = NewTokens(
            fold.finish_queries(made.queries, rotation),
            fold.finish_keys(made.keys, rotation),
            made.values,
        )
        layer, step = cache.folded_layer(fold.index), cache.step_of(fold.pipeline)
        store = cache.stores.get(id(fold.pipeline))
        layer.prepare(step, new.keys, new.values)
        if cache.expands_in_attention(fold):
            cache.expand(layer, attachment.rotary_at)
        mixed = attend(fold, layer, store, step, new, attachment.rotary_at)
        mixed = mixed.transpose(1, 2).flatten(2)
        if made.gate is not None:
            mixed = mixed * torch.sigmoid(made.gate)
        return fold.module.o_proj(mixed), None

    forward.__signature__ = inspect.signature(fold.module.forward)  # type: ignore[attr-defined]
    return forward


def layer_forward(attachment: Attachment, index: int, own: Any) -> Any:
    """A decoder layer's forward that hands its input on in passes that leave the layer out."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(hidden_states, *args, **kwargs) if attachment.runs(index) else hidden_states

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    return forward


def last_logits_forward(attachment: Attachment, own: Any) -> Any:
    """The model's forward, noting whether the caller wants no logits but the last token's."""

    signature = inspect.signature(own)

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        asked = bound.arguments
        only_last = _keeps_only_last(asked) and asked.get("labels") is None
        attachment.wants_last_only = only_last
        if only_last:
            asked["logits_to_keep"] = 1  # an index would count columns that were left out
        try:
            return own(*bound.args, **bound.kwargs)
        finally:
            attachment.wants_last_only = False

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _keeps_only_last(asked: Mapping[str, Any]) -> bool:
    """Whether `logits_to_keep` is 1, or an index that is the last column's alone."""
    keep, inputs = asked.get("logits_to_keep"), asked.get("input_ids")
    if isinstance(keep, Tensor):
        inputs = asked.get("inputs_embeds") if inputs is None else inputs
        return inputs is not None and keep.tolist() == [inputs.shape[1] - 1]
    return isinstance(keep, int) and keep == 1


def _flat(x: Tensor) -> Tensor:
    """(batch, kv_heads, seq, head_dim) to (batch, seq, kv_heads * head_dim)."""
    return x.transpose(1, 2).flatten(2)
