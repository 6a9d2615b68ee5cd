"""Rows that join a cache in the middle of its work, and the room that they give back.

Folded layers place tokens by their position in their own row, so there rows only need buffers of
one length: the shorter ones get unused places and slots. transformers' own attention layers hold a
column for every token of the longest row, so there a shorter row gets pads on its left, which the
attention mask of every later forward must hide. Recurrent states have no length at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from kvfold.errors import CacheError
from kvfold.runtime.buffers import rounded
from kvfold.runtime.cache import FoldedCache
from kvfold.runtime.codes import CodeStore
from kvfold.runtime.columns import PAD, ColumnLog
from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.slots import SlotStore

JOINABLE = (FoldedLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
"""Layers whose tensors are all known; a subclass may have more, so only these very classes."""


def is_joinable(cache: Cache) -> bool:
    """Whether rows can join and leave this cache: whether every layer is of a kind known here."""
    return all(type(layer) in JOINABLE for layer in cache.layers)


def join_rows(into: Cache, other: Cache) -> None:
    """Put the rows of `other` behind those of `into`; both have seen at least one token a row.

    Both caches are of one model under one attachment, or of one plain model. `other` must not be
    used afterwards. A row keeps its tokens, so it goes on as it would have gone on alone, if the
    attention mask hides the columns before its first token: it has as many columns at the right
    as it has tokens. Raises `CacheError` for caches of two owners or with layers of unknown kinds.
    """
    _refuse_strangers(into, other)
    for mine, theirs in zip(into.layers, other.layers, strict=True):
        if isinstance(mine, FoldedLayer) and isinstance(theirs, FoldedLayer):
            _join_folded(mine, theirs)
        elif isinstance(mine, LinearAttentionLayer):
            _join_states(mine, theirs)
        else:
            _join_attention(mine, theirs)
    if isinstance(into, FoldedCache) and isinstance(other, FoldedCache):
        for key, store in into.stores.items():
            _join_codes(store, other.stores[key], len(into.rows), len(other.rows))
        into.log = _joined_logs(into.log.table(), other.log.table())
        into.rows += other.rows
        _set_columns(into, max(into.columns, other.columns))


def select_rows(cache: Cache, rows: list[int], lengths: list[int]) -> None:
    """Keep these rows in this order, repeats allowed, and give back what no other row needed.

    rows: at least one. lengths: the tokens that each kept row has seen.
    """
    cache.reorder_cache(torch.tensor(rows))  # type: ignore[arg-type]
    longest = max(lengths)
    for layer in cache.layers:
        if isinstance(layer, FoldedLayer):
            _trim_folded(layer, longest)
        elif isinstance(layer, DynamicLayer):
            _trim_attention(layer, longest)
    if isinstance(cache, FoldedCache):
        for store in cache.stores.values():
            for part in store.slots.stores:
                _trim_slots(part, store.schedule.made(longest))
            _trim_pending(store, store.schedule.pending_places(longest))
        table = cache.log.table()
        cache.log = _log_of(table[:, table.shape[1] - longest :])
        _set_columns(cache, longest)


def _refuse_strangers(into: Cache, other: Cache) -> None:
    owners = [cache.owner if isinstance(cache, FoldedCache) else None for cache in (into, other)]
    kinds = [[type(layer) for layer in cache.layers] for cache in (into, other)]
    if owners[0] is not owners[1] or kinds[0] != kinds[1] or not is_joinable(into):
        raise CacheError(
            "rows can only join a cache of the same model under the same attachment, with layers "
            f"of the kinds {', '.join(kind.__name__ for kind in JOINABLE)}; got two caches of "
            "different ones, or another kind of layer; run the rows apart"
        )
    for cache in (into, other):
        if isinstance(cache, FoldedCache):
            cache.require_whole()


def _set_columns(cache: FoldedCache, columns: int) -> None:
    """Columns are those of the longest row; crop must not take any that pads another."""
    cache.columns = columns
    cache.padded_columns = columns - min(cache.rows) if len(set(cache.rows)) > 1 else 0
    for layer in cache.layers:
        if isinstance(layer, FoldedLayer):
            layer.columns = columns


def _log_of(table: Tensor) -> ColumnLog:
    made = ColumnLog()
    made.append(table, table != PAD)
    return made


def _joined_logs(first: Tensor, second: Tensor) -> ColumnLog:
    """What was fed in which column, each (rows, columns); the shorter gets pads before its own."""
    columns = max(first.shape[1], second.shape[1])
    made = [functional.pad(x, (columns - x.shape[1], 0), value=PAD) for x in (first, second)]
    return _log_of(torch.cat(made))


def _behind(first: Tensor, second: Tensor) -> Tensor:
    """(rows, heads, places, width) of both, the shorter with zeros behind its places."""
    places = max(first.shape[2], second.shape[2])
    made = [functional.pad(x, (0, 0, 0, places - x.shape[2])) for x in (first, second)]
    return torch.cat(made)


def _before(first: Tensor, second: Tensor) -> Tensor:
    """(rows, heads, columns, width) of both, the shorter with zeros before its columns."""
    columns = max(first.shape[2], second.shape[2])
    made = [functional.pad(x, (0, 0, columns - x.shape[2], 0)) for x in (first, second)]
    return torch.cat(made)


def _or_nothing(
    first: Tensor | None, second: Tensor | None, rows: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """Both tensors, an absent one as zeros of the other's shape; None where both are absent."""
    if first is None and second is None:
        return None
    if first is None:
        assert second is not None
        return second.new_zeros(rows[0], *second.shape[1:]), second
    return first, first.new_zeros(rows[1], *first.shape[1:]) if second is None else second


def _join_folded(mine: FoldedLayer, theirs: FoldedLayer) -> None:
    rows = (mine.keys.shape[0], theirs.keys.shape[0])
    exact = max(mine.exact_places, theirs.exact_places)
    for layer in (mine, theirs):
        layer.refit(exact)
    mine.keys, mine.values = _behind(mine.keys, theirs.keys), _behind(mine.values, theirs.values)
    for name, store in mine.stores.items():
        _join_slots(store, theirs.stores[name], rows)


def _join_slots(mine: SlotStore, theirs: SlotStore, rows: tuple[int, int]) -> None:
    if mine.values is None:
        mine.dtype = theirs.dtype
    for name in ("values", "scales"):
        both = _or_nothing(getattr(mine, name), getattr(theirs, name), rows)
        setattr(mine, name, None if both is None else _behind(*both))


def _join_codes(mine: CodeStore, theirs: CodeStore, rows: int, more: int) -> None:
    for name in ("partial", "pending"):
        both = _or_nothing(getattr(mine, name), getattr(theirs, name), (rows, more))
        setattr(mine, name, None if both is None else _behind(*both))
    for part, their_part in zip(mine.slots.stores, theirs.slots.stores, strict=True):
        _join_slots(part, their_part, (rows, more))


def _join_states(mine: Any, theirs: Any) -> None:
    for name in ("conv_states", "recurrent_states"):
        held, joining = getattr(mine, name), getattr(theirs, name)
        for index, state in held.items():
            if state is not None:
                held[index] = torch.cat([state, joining[index]])


def _join_attention(mine: Any, theirs: Any) -> None:
    columns = max(mine.get_seq_length(), theirs.get_seq_length())
    mine.keys, mine.values = _before(mine.keys, theirs.keys), _before(mine.values, theirs.values)
    if mine.is_sliding:
        mine.cumulative_length = columns


def _trim_folded(layer: FoldedLayer, longest: int) -> None:
    slots, exact = layer.schedule.made(longest), layer.schedule.exact_places(longest)
    layer.refit(min(layer.exact_places, exact))
    places = layer.exact_places + rounded(slots)
    if layer.keys.shape[2] > places:
        layer.keys = layer.keys[:, :, :places].clone()
        layer.values = layer.values[:, :, :places].clone()
    for store in layer.stores.values():
        _trim_slots(store, slots)


def _trim_slots(store: SlotStore, slots: int) -> None:
    places = rounded(slots)
    for name, tensor in store.tensors().items():
        if tensor.shape[2] > places:
            setattr(store, name, tensor[:, :, :places].clone())


def _trim_pending(store: CodeStore, places: int) -> None:
    if store.pending is not None and store.pending.shape[2] > places:
        store.pending = store.pending[:, :, :places].clone()


def _trim_attention(layer: Any, columns: int) -> None:
    kept = columns
    if layer.is_sliding:
        layer.cumulative_length = columns
        kept = min(columns, layer.sliding_window - 1)
    if layer.keys.shape[2] > kept:
        first = layer.keys.shape[2] - kept
        layer.keys = layer.keys[:, :, first:].clone()
        layer.values = layer.values[:, :, first:].clone()
