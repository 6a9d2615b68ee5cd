"""A world in which a stage's own code runs without data, for a machine that need not be there.

Models and add-ons live on the meta device: shapes and dtypes, no memory and no arithmetic. What
code asks of values gets an answer that leads it on the way of a run in which nothing is wrong:
yes, 0 or 1. Attention is computed by the operation that the machine in question would take, as
its memory depends on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.anatomy import anatomy

Place = Literal["cpu", "cuda"]
HALF = (torch.bfloat16, torch.float16)
LONGEST_FLASH_HEAD = 256
aten = torch.ops.aten


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """A causal language model of a configuration, frozen and without data.

    Raises `UnsupportedModelError` for an architecture that kvfold does not know.
    """
    from transformers import AutoModelForCausalLM

    anatomy(config)
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM
        model = made.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


@contextmanager
def dry_world(place: Place) -> Iterator[None]:
    """Code inside runs on meta tensors as it would on a CPU or a CUDA device."""
    values = _Values()  # type: ignore[no-untyped-call]
    with values, _Answers(), _attention_of(place):
        yield


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions about values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta:
            if func is aten._local_scalar_dense.default:
                return _value(first.dtype)
            if func is aten.equal.default:
                return True
            if func is aten.index.Tensor:
                args = (first, [_all_of(index) for index in args[1]])
        return func(*args, **(kwargs or {}))


def _value(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 0


def _all_of(index: Tensor | None) -> Tensor | None:
    """A mask as the index of everything."""
    if index is None or index.dtype != torch.bool:
        return index
    return torch.empty(len(index), dtype=torch.int64, device="meta")


class _Answers(TorchFunctionMode):
    """Stands in for what has no meaning without data."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func is Tensor.cpu:
                return args[0]
            if func is Tensor.numpy:
                return np.zeros(1)
            if func is Tensor.tolist:
                return np.zeros(tuple(args[0].shape)).tolist()
        return func(*args, **(kwargs or {}))


@contextmanager
def _attention_of(place: Place) -> Iterator[None]:
    """Attention on meta tensors is that of a device.

    In place of the function itself, since modes are off while autograd computes checkpointed
    layers again.
    """
    own = functional.scaled_dot_product_attention

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.is_meta:
            return _attention(place, query, *args, **kwargs)
        return own(query, *args, **kwargs)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


def _attention(
    place: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The operation that `scaled_dot_product_attention` comes to on a device."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), -torch.inf
        )
    found: Tensor
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    if place == "cpu" and not learns_mask:
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return found
    flashes = attn_mask is None and query.dtype in HALF and query.shape[-1] <= LONGEST_FLASH_HEAD
    if place == "cuda" and flashes:
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return found
    if place == "cuda" and query.dtype != torch.float64:
        key, value = _every_head(query, key), _every_head(query, value)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        learns = any(x.requires_grad for x in (query, key, value))
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, learns, dropout_p, is_causal, scale=scale
        )[0]
        return found
    found = torch._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return found


def _every_head(query: Tensor, shared: Tensor) -> Tensor:
    times = query.shape[1] // shared.shape[1]
    return shared if times == 1 else shared.repeat_interleave(times, dim=1)
