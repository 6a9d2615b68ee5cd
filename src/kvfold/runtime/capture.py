"""Streams activations out of a frozen model, one batch at a time.

Fitting, its report and exact-history scoring all need what the plain model computes on the way:
hidden states, keys and values. Hooks read them off during one forward of the decoder, without a
cache and without logits, and the forward is cut short once the last of them is there. The model
is left as it was, also after an exception, and nothing is kept from one batch to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.anatomy import (
    Anatomy,
    attention_module,
    mixer_module,
    require_plain,
    text_decoder,
)
from kvfold.errors import FitError
from kvfold.methods import Activations, Source
from kvfold.runtime.sharding import is_sharded


class _CapturedAllError(Exception):
    """Leaves the forward early: everything that was asked for is there."""


class _Collector:
    """Takes tensors by key, and stops the forward when none is missing, if told so."""

    def __init__(self, wanted: Collection[Source], *, stops: bool) -> None:
        self.missing = set(wanted)
        self.stops = stops
        self.taken: dict[Source, Tensor] = {}

    def take(self, key: Source, tensor: Tensor) -> None:
        _check_finite(key, tensor)
        self.taken[key] = tensor.detach()
        self.missing.discard(key)
        if self.stops and not self.missing:
            raise _CapturedAllError


@torch.no_grad()
def capture(
    model: Any, anatomy: Anatomy, sources: Collection[Source], input_ids: Tensor
) -> Activations:
    """The plain model's activations for some token ids.

    sources: which; keys and values are pre-norm and pre-RoPE. input_ids: (batch, seq), no
    padding. Each result is (batch, seq, width) in the model's dtype. Raises `FitError` naming the
    first source that is not finite.
    """
    if not sources:
        return {}
    # Layers that are spread over processes end a forward as they began it, or not at all.
    return _run(model, anatomy, sources, input_ids, stops=not is_sharded(model))[0]


@torch.no_grad()
def plain_pass(
    model: Any, anatomy: Anatomy, sources: Collection[Source], input_ids: Tensor
) -> tuple[Activations, Tensor]:
    """The plain model's activations and its final hidden states, from one forward.

    sources, input_ids and the activations: as in `capture`. The final hidden states are (batch,
    seq, hidden), after the final norm. Raises `FitError` as `capture` does.
    """
    activations, hidden = _run(model, anatomy, sources, input_ids, stops=False)
    assert hidden is not None
    return activations, hidden


def _run(
    model: Any, anatomy: Anatomy, sources: Collection[Source], input_ids: Tensor, *, stops: bool
) -> tuple[Activations, Tensor | None]:
    collector, hidden = _Collector(sources, stops=stops), None
    require_plain(model)
    decoder = text_decoder(model)
    device = next(decoder.parameters()).device
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(_tap(model, anatomy, source, collector))
        with suppress(_CapturedAllError):
            hidden = decoder(input_ids=input_ids.to(device), use_cache=False).last_hidden_state
    if collector.missing:
        raise FitError(
            "every activation that the fit needs must come up in the model's forward; "
            f"{', '.join(str(source) for source in collector.missing)} did not: the model runs its "
            "layers in another way than its architecture's plain implementation"
        )
    return dict(collector.taken), hidden


def _taker(collector: _Collector, key: Source) -> Callable[[Tensor], None]:
    return lambda tensor: collector.take(key, tensor)


@contextmanager
def _tap(model: Any, anatomy: Anatomy, source: Source, collector: _Collector) -> Iterator[None]:
    take = _taker(collector, source)
    layers = text_decoder(model).layers
    if source.kind == "inputs":
        with _input_tap(mixer_module(model, source.layer), take):
            yield
        return
    if source.kind == "hidden":
        if source.layer < anatomy.num_layers:
            with _input_tap(layers[source.layer], take):
                yield
        else:
            with _output_tap(layers[anatomy.num_layers - 1], take):
                yield
        return
    keys, values = anatomy.family.keys_values(attention_module(model, source.layer))
    module, start = keys if source.kind == "keys" else values
    stop = start + anatomy.layers[source.layer].kv_width
    with _output_tap(module, lambda output: take(output[..., start:stop])):
        yield


@contextmanager
def _input_tap(module: nn.Module, take: Callable[[Tensor], None]) -> Iterator[None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(args[0] if args else kwargs["hidden_states"])

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _output_tap(module: nn.Module, take: Callable[[Tensor], None]) -> Iterator[None]:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        take(output[0] if isinstance(output, tuple) else output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _check_finite(source: Source, tensor: Tensor) -> None:
    if bool(torch.isfinite(tensor).all()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    raise FitError(
        f"activations must be finite; {source} has {bad} of {tensor.numel()} values that are NaN "
        f"or infinite ({tensor.dtype}); load the model in bfloat16 or float32, and check its "
        "weights"
    )
