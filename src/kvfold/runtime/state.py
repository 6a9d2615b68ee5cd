"""A cache in plain form: for each row its tokens and tensors by name, without pads or spare room.

The form does not depend on the batch that a row was in, so that rows can leave a batch, join
another, or lie on disk. What a row of n tokens must hold follows from n and the attachment alone
(`Layout`): whatever else comes, damaged or of another plan, is refused before it enters a cache.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.anatomy import LayerAnatomy, linear_attention_module, linear_inputs
from kvfold.errors import CacheError
from kvfold.runtime.buffers import rounded
from kvfold.runtime.codes import CodeStore
from kvfold.runtime.folded_layer import FoldedLayer
from kvfold.runtime.remaking import pending_name, slot_names
from kvfold.runtime.slots import SlotStore

if TYPE_CHECKING:
    from kvfold.runtime.attach import Attachment
    from kvfold.runtime.cache import FoldedCache


@dataclass(frozen=True)
class RowState:
    """One row of a cache.

    token_ids: (tokens,) int32; -2 (`columns.UNKNOWN`) for tokens that came as embeddings. tensors:
    by name, each without the row's axis: exact places and slots are (heads, places, width). A
    layer's expanded slots, and codes that wait to become visible, may be left out where the row
    has all codes (`compacted`); they are made again when the row enters a cache.
    """

    token_ids: Tensor
    tensors: Mapping[str, Tensor]

    @property
    def seen_tokens(self) -> int:
        """Real tokens seen."""
        return int(self.token_ids.shape[0])

    def nbytes(self) -> int:
        """Bytes of the tensors; the ids take 4 a token more."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copied(self) -> RowState:
        """A state with tensors of its own."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return RowState(self.token_ids.clone(), tensors)


@dataclass(frozen=True)
class Part:
    """What a tensor of a state must be. dtype: None where any floating one will do."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether a tensor is such a one."""
        right = dtype.is_floating_point if self.dtype is None else dtype == self.dtype
        return right and tuple(shape) == self.shape


@dataclass(frozen=True)
class Place:
    """Where part of a row lies in a buffer (rows, heads, places, width) of a folded cache.

    owner, attribute: what holds the buffer. start: its first place; room: places for it.
    """

    name: str
    owner: Any
    attribute: str
    part: Part
    start: int
    room: int

    @property
    def is_used(self) -> bool:
        """Whether the row has anything there."""
        return self.part.shape[1] > 0

    def view(self, buffer: Tensor, row: int) -> Tensor:
        """The part in its buffer, (heads, places, width)."""
        return buffer[row, :, self.start : self.start + self.part.shape[1]]


class Layout:
    """What rows of a cache of one attachment consist of, and where.

    cache: any of the attachment's, for its structure; it is not changed.
    """

    def __init__(self, attachment: Attachment, cache: FoldedCache) -> None:
        self.attachment = attachment
        self.cache = cache
        self.dtype: torch.dtype = attachment.model.dtype

    def parts(self, seen: int) -> dict[str, Part]:
        """What a row that has seen so many tokens holds, by name."""
        made = {place.name: place.part for place in self.places(seen) if place.is_used}
        for layer in self.unfolded():
            made |= self._unfolded_parts(layer, seen)
        return made

    def follows(self, layer: FoldedLayer) -> CodeStore | None:
        """The store whose codes a layer's expanded slots can be made of; None if they can't."""
        store = self.cache.stores.get(id(layer.fold.pipeline))
        return store if store is not None and store.keep and not layer.fold.expands_early else None

    def to_rebuild(self, seen: int, found: Container[str]) -> list[FoldedLayer]:
        """The layers with slots after so many tokens that codes can give and `found` has not."""
        layers = [self.cache.folded_layer(index) for index in sorted(self.cache.folded)]
        return [
            layer
            for layer in layers
            if self.follows(layer) is not None
            and layer.schedule.slots(seen)
            and not any(name in found for name in slot_names(layer))
        ]

    def to_refill(self, seen: int, found: Container[str]) -> dict[str, CodeStore]:
        """The stores that also have their waiting codes among all others, where `found` lacks them.

        By the name that the waiting ones would have.
        """
        named = {pending_name(n): store for n, store in enumerate(self.cache.stores.values())}
        return {
            name: store
            for name, store in named.items()
            if store.spare
            and store.schedule.pending_size
            and store.schedule.made(seen)
            and name not in found
        }

    def spare(self, seen: int, found: Container[str]) -> list[tuple[str, ...]]:
        """What a row may be without that `found` has not: names that go together."""
        layers = [slot_names(layer) for layer in self.to_rebuild(seen, found)]
        return [*layers, *((name,) for name in self.to_refill(seen, found))]

    def unfolded(self) -> list[LayerAnatomy]:
        """The layers that are left to transformers' own cache."""
        layers = self.attachment.anatomy.layers
        return [layer for layer in layers if layer.index not in self.cache.folded]

    def places(self, seen: int) -> list[Place]:
        """All parts of the folded layers and of the code stores, also those without a token yet."""
        found: list[Place] = []
        for index in sorted(self.cache.folded):
            found += self._of_layer(self.cache.folded_layer(index), seen)
        for number, store in enumerate(self.cache.stores.values()):
            found += self._of_codes(f"codes.{number}", store, seen)
        return found

    def _of_layer(self, layer: FoldedLayer, seen: int) -> Iterator[Place]:
        fold, schedule = layer.fold, layer.schedule
        heads, head_dim = fold.anatomy.kv_heads, fold.anatomy.head_dim
        exact, name = layer.exact_places, f"layers.{fold.index}"
        kept = Part((heads, min(seen, schedule.exact_size), head_dim), self.dtype)
        slots = schedule.made(seen) if fold.expands_early else schedule.slots(seen)
        inside = fold.reading == "expanded" and "slot_keys" not in layer.stores
        for held in ("keys", "values"):
            yield Place(f"{name}.{held}", layer, held, kept, 0, exact)
            if inside:
                part = Part((heads, slots, head_dim), self.dtype)
                yield Place(f"{name}.slots.{held}", layer, held, part, exact, rounded(slots))
        widths = {"rotary": fold.anatomy.rotary_dim, "rho": 1}
        for held, store in layer.stores.items():
            shape = (heads, slots, widths.get(held, head_dim))
            yield from self._of_store(f"{name}.{held}", store, shape)

    def _of_store(
        self, name: str, store: SlotStore, shape: tuple[int, int, int]
    ) -> Iterator[Place]:
        heads, slots, _ = shape
        room = rounded(slots)
        if store.codec is None:
            yield Place(f"{name}.values", store, "values", Part(shape, self.dtype), 0, room)
            return
        codes = Part((heads, slots, store.codec.row_bytes), torch.uint8)
        yield Place(f"{name}.values", store, "values", codes, 0, room)
        scales = Part((heads, slots, 1), torch.float16)
        yield Place(f"{name}.scales", store, "scales", scales, 0, room)

    def _of_codes(self, name: str, store: CodeStore, seen: int) -> Iterator[Place]:
        schedule, pipeline = store.schedule, store.pipeline
        made, beyond = schedule.made(seen), max(0, seen - schedule.anchors)
        width = pipeline.depth.code_width
        if store.keep and store.slots.parts:
            pairs = zip(store.slots.parts, store.slots.stores, strict=True)
            for number, (part, held) in enumerate(pairs):
                shape = (part.heads, made, part.width)
                yield from self._of_store(f"{name}.slots.{number}", held, shape)
        elif store.keep:
            yield from self._of_store(f"{name}.slots", store.slots.stores[0], (1, made, width))
        size = store.partial_size
        records = Part((1, min(beyond, size), pipeline.record_width), self.dtype)
        yield Place(f"{name}.partial", store, "partial", records, 0, size)
        if store.late:
            codes = Part((1, min(made, schedule.pending_size), width), self.dtype)
            room = schedule.pending_places(seen)
            yield Place(f"{name}.pending", store, "pending", codes, 0, room)

    def _unfolded_parts(self, layer: LayerAnatomy, seen: int) -> dict[str, Part]:
        name = f"layers.{layer.index}"
        if seen == 0:
            return {}
        if layer.kind == "linear_attention":
            weights = linear_inputs(linear_attention_module(self.attachment.model, layer.index))
            state = (weights.v_heads, weights.k_dim, weights.v_dim)
            return {
                f"{name}.convolution": Part(tuple(weights.conv_weight.shape), self.dtype),
                f"{name}.recurrent": Part(state, None),
            }
        part = Part((layer.kv_heads, kept_tokens(layer, seen), layer.head_dim), self.dtype)
        return {f"{name}.keys": part, f"{name}.values": part}

    def check(self, state: RowState) -> None:
        """Raise `CacheError` that names what is missing, unexpected or of another shape."""
        self.check_parts(
            state.seen_tokens, {n: (tuple(t.shape), t.dtype) for n, t in state.tensors.items()}
        )

    def check_parts(
        self, seen: int, found: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        """The same from shapes and dtypes alone, before any tensor is read."""
        parts = self.parts(seen)
        spare = {name for names in self.spare(seen, found) for name in names}
        problems = [
            f"{name} is missing" for name in parts if name not in found and name not in spare
        ]
        problems += [f"{name} is not expected" for name in found if name not in parts]
        problems += [
            f"{name} is {list(shape)} {dtype} and not {list(parts[name].shape)} {parts[name].dtype}"
            for name, (shape, dtype) in found.items()
            if name in parts and not parts[name].fits(shape, dtype)
        ]
        if problems:
            more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise CacheError(
                f"a row of {seen} tokens must hold what this attachment's plan keeps of them; "
                f"{'; '.join(problems[:3])}{more}; attach the add-on under the plan, dtype and "
                "resident that the row was made with"
            )


def check_row(
    attachment: Attachment,
    seen: int,
    found: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    """Raise `CacheError` unless a row of so many tokens has tensors like these."""
    Layout(attachment, attachment.new_cache()).check_parts(seen, found)


def compacted(attachment: Attachment, state: RowState) -> RowState:
    """The state without what its codes give again bit by bit: expanded slots, waiting codes.

    Whether they do is tried, layer by layer: a matrix product of a few rows, as a decode step
    makes it, may be rounded otherwise than one of many. Where they don't, or no codes are kept
    (`attach(..., keep_codes=True)`), a layer's slots stay. Touches nothing that a running step
    uses, so it may be called in another thread.
    """
    held = state.tensors
    spare = Layout(attachment, attachment.new_cache()).spare(state.seen_tokens, ())
    spare = [names for names in spare if all(name in held for name in names)]
    short = _without(state, spare)
    if not spare:
        return short
    made = attachment.rows_of(attachment.cache_from([short]), copy=False)[0].tensors
    same = [n for n in spare if all(torch.equal(made[name], held[name]) for name in n)]
    return _without(state, same)


def _without(state: RowState, groups: Sequence[tuple[str, ...]]) -> RowState:
    gone = {name for names in groups for name in names}
    return RowState(state.token_ids, {n: t for n, t in state.tensors.items() if n not in gone})


def kept_tokens(layer: LayerAnatomy, seen: int) -> int:
    """How many of a row's tokens a layer of transformers' own keeps."""
    return seen if layer.sliding_window is None else min(seen, layer.sliding_window - 1)


def rows_of(attachment: Attachment, cache: FoldedCache, rows: Sequence[int]) -> list[RowState]:
    """Some rows of a cache, as views into it; see `Attachment.rows_of`."""
    layout = Layout(attachment, cache)
    made = []
    for row in rows:
        ids, columns = cache.log.row(row)
        tensors = {
            place.name: place.view(getattr(place.owner, place.attribute), row)
            for place in layout.places(cache.rows[row])
            if place.is_used
        }
        for layer in layout.unfolded():
            tensors |= _from_unfolded(cache.layers[layer.index], layer, row, columns, cache.columns)
        made.append(RowState(ids, tensors))
        layout.check(made[-1])
    return made


def _from_unfolded(
    held: Any, layer: LayerAnatomy, row: int, columns: Tensor, width: int
) -> dict[str, Tensor]:
    """One row of a layer of transformers' own, without the row's pads."""
    name = f"layers.{layer.index}"
    if not len(columns):
        return {}
    if layer.kind == "linear_attention":
        kernel = held.conv_kernel_size[0]
        return {
            f"{name}.convolution": held.conv_states[0][row, :, -kernel:],
            f"{name}.recurrent": held.recurrent_states[0][row],
        }
    count = kept_tokens(layer, len(columns))
    places = columns[len(columns) - count :] - (width - held.keys.shape[2])
    first, last = (int(places[0]), int(places[-1])) if count else (0, -1)
    if last - first + 1 == count:
        kept: Any = slice(first, last + 1)
    else:
        kept = places.to(held.keys.device)
    return {f"{name}.keys": held.keys[row][:, kept], f"{name}.values": held.values[row][:, kept]}
