"""Decode attention over quantised slots: no float copy of the history is ever made.

Keys and values stay in the rotated basis that they were quantised in. A query is rotated once and
multiplied with decoded keys, `slot_logits`; weights mix decoded values, `slot_mix`, and the mix is
turned back once.

Each has a plain path, any device and dtype, which decodes a block of slots at a time, and a fused
one for CPUs, in `quantised_reading.cpp`, which unpacks a few slots at a time in registers and
cache. The fused path reads as many bytes as are stored and is compiled when first needed;
`chosen_path` says which runs. Both compute in float32, or in float64 for float64 queries.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.errors import CacheError
from kvfold.methods.codebooks import lloyd_max
from kvfold.methods.turboquant import UNIFORM_BITS, Quantised, TurboQuant, math_dtype
from kvfold.runtime.native import native_library, say_plain

SLOT_BLOCK = 1024
"""Slots that the plain path decodes at a time."""
SERIAL_VALUES = 1 << 17
"""Up to so many stored values one thread is faster than waking others."""
SELF_TEST_TOLERANCE = 1e-4
"""Of float32 sums of 64 terms near 1, in another order; a wrong code errs by 1e-2 or more."""

ReadingPath = Literal["fused", "plain"]


def slot_logits(codec: TurboQuant, queries: Tensor, keys: Quantised) -> Tensor:
    """`q . k` of rotated queries and quantised keys, neither scaled nor masked.

    queries: (batch, kv_heads, grouped, head_dim), post-RoPE, rotated by `codec`. keys: codes
    (batch, kv_heads, slots, row_bytes), strided as may be. Gives (batch, kv_heads, grouped,
    slots), float32, or float64 for float64 queries. Raises `CacheError` for shapes that don't
    belong together or codes of another codec.
    """
    _check(codec, queries, keys, codec.width)
    if chosen_path(codec, queries, keys) == "fused":
        return fused_slot_logits(codec, queries, keys)
    return plain_slot_logits(codec, queries, keys)


def slot_mix(codec: TurboQuant, weights: Tensor, values: Quantised) -> Tensor:
    """`sum_s w_s v_s` of quantised values, in their rotated basis; `codec.unrotate` ends it.

    weights: (batch, kv_heads, grouped, slots). values: codes (batch, kv_heads, slots,
    row_bytes), strided as may be. Gives (batch, kv_heads, grouped, head_dim), float32, or
    float64 for float64 weights. Raises `CacheError` as `slot_logits` does.
    """
    _check(codec, weights, values, values.codes.shape[2])
    if chosen_path(codec, weights, values) == "fused":
        return fused_slot_mix(codec, weights, values)
    return plain_slot_mix(codec, weights, values)


def chosen_path(codec: TurboQuant, given: Tensor, stored: Quantised) -> ReadingPath:
    """What reads `stored` for these queries or weights: the fused path where it can."""
    return "fused" if supports(codec, given, stored) and _kernels() is not None else "plain"


def supports(codec: TurboQuant, given: Tensor, stored: Quantised) -> bool:
    """Whether the fused path is made for these tensors, compiled or not.

    On a CPU; queries or weights of at most 32 bits that need no gradient; codes whose rows are
    contiguous, in float16 scales.
    """
    on_cpu = {given.device.type, stored.codes.device.type, stored.scales.device.type} == {"cpu"}
    return (
        on_cpu
        and given.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not (given.requires_grad and torch.is_grad_enabled())
        and stored.scales.dtype == torch.float16
        and (stored.codes.stride(-1) == 1 or codec.row_bytes == 1)
    )


def plain_slot_logits(codec: TurboQuant, queries: Tensor, keys: Quantised) -> Tensor:
    """The reference of `slot_logits`, any device."""
    work = queries.to(math_dtype(queries.dtype))
    decoded = (codec.decode_rotated(block, work.dtype) for block in _blocks(keys))
    return torch.cat([work @ block.transpose(2, 3) for block in decoded], dim=-1)


def plain_slot_mix(codec: TurboQuant, weights: Tensor, values: Quantised) -> Tensor:
    """The reference of `slot_mix`, any device."""
    work = weights.to(math_dtype(weights.dtype))
    mixed = work.new_zeros(*work.shape[:3], codec.width)
    start = 0
    for block in _blocks(values):
        decoded = codec.decode_rotated(block, work.dtype)
        stop = start + decoded.shape[2]
        mixed = mixed + work[..., start:stop] @ decoded
        start = stop
    return mixed


def fused_slot_logits(codec: TurboQuant, queries: Tensor, keys: Quantised) -> Tensor:
    """`slot_logits` where `chosen_path` says so."""
    kernels = _kernels()
    assert kernels is not None and supports(codec, queries, keys)
    given = queries.to(torch.float32).contiguous()
    return _run_logits(kernels, codec, given, keys)


def fused_slot_mix(codec: TurboQuant, weights: Tensor, values: Quantised) -> Tensor:
    """`slot_mix` where `chosen_path` says so."""
    kernels = _kernels()
    assert kernels is not None and supports(codec, weights, values)
    given = weights.to(torch.float32)
    if given.stride(-1) != 1:
        given = given.contiguous()
    return _run_mix(kernels, codec, given, values)


class _Kernels(NamedTuple):
    logits: Callable[..., None]
    mix: Callable[..., None]


@functools.cache
def _kernels() -> _Kernels | None:
    """The compiled kernels, if they can be had and give what the plain path gives."""
    library = native_library(Path(__file__).with_suffix(".cpp"))
    if library is None:
        return None
    kernels = _declared(library)
    for bits in range(1, UNIFORM_BITS + 1):
        if not _passes(kernels, TurboQuant(64, bits, seed=0)):
            say_plain(f"the compiled code is wrong at {bits} bits; name another compiler in CXX")
            return None
    return kernels


def _declared(library: ctypes.CDLL) -> _Kernels:
    logits, mix = library.kvfold_slot_logits, library.kvfold_slot_mix
    pointers, numbers = [ctypes.c_void_p] * 5, [ctypes.c_int] * 2
    logits.argtypes = [*pointers, *[ctypes.c_int64] * 11, *numbers]
    mix.argtypes = [*pointers, *[ctypes.c_int64] * 14, *numbers]
    logits.restype = mix.restype = None
    return _Kernels(logits, mix)


def _passes(kernels: _Kernels, codec: TurboQuant) -> bool:
    """Whether both kernels agree with the plain path on a few slots."""
    angles = torch.arange(5 * 64, dtype=torch.float32)
    stored = codec.encode(torch.sin(angles * angles).view(1, 1, 5, 64))
    queries = torch.cos(angles[: 3 * 64] * 0.7).view(1, 1, 3, 64)
    weights = torch.cos(angles[: 3 * 5]).view(1, 1, 3, 5)
    logits = _run_logits(kernels, codec, queries, stored)
    mixed = _run_mix(kernels, codec, weights, stored)
    close = functools.partial(torch.allclose, atol=SELF_TEST_TOLERANCE, rtol=0.0)
    return bool(
        close(logits, plain_slot_logits(codec, queries, stored))
        and close(mixed, plain_slot_mix(codec, weights, stored))
    )


def _run_logits(kernels: _Kernels, codec: TurboQuant, given: Tensor, keys: Quantised) -> Tensor:
    out = given.new_empty(*given.shape[:3], keys.codes.shape[2])
    kernels.logits(
        given.data_ptr(),
        *_pointers(codec, keys),
        out.data_ptr(),
        *_sizes(codec, given, keys),
        codec.bits,
        _threads(codec, keys),
    )
    return out


def _run_mix(kernels: _Kernels, codec: TurboQuant, given: Tensor, values: Quantised) -> Tensor:
    out = given.new_empty(*given.shape[:3], codec.width)
    kernels.mix(
        given.data_ptr(),
        *_pointers(codec, values),
        out.data_ptr(),
        *_sizes(codec, given, values),
        *given.stride()[:3],
        codec.bits,
        _threads(codec, values),
    )
    return out


def _pointers(codec: TurboQuant, stored: Quantised) -> tuple[int, int, int]:
    levels = _padded_levels(codec.bits).data_ptr()
    return stored.codes.data_ptr(), stored.scales.data_ptr(), levels


def _sizes(codec: TurboQuant, given: Tensor, stored: Quantised) -> tuple[int, ...]:
    batch, heads, slots, _ = stored.codes.shape
    strides = (*stored.codes.stride()[:3], *stored.scales.stride()[:3])
    return (batch, heads, given.shape[2], slots, codec.width, *strides)


def _threads(codec: TurboQuant, stored: Quantised) -> int:
    batch, heads, slots, _ = stored.codes.shape
    few = batch * heads * slots * codec.width <= SERIAL_VALUES
    return 1 if few else torch.get_num_threads()


@functools.cache
def _padded_levels(bits: int) -> Tensor:
    """Levels in float32, 16 at least, since the kernels load whole vectors of them."""
    levels = () if bits == UNIFORM_BITS else lloyd_max(bits)
    return torch.tensor([*levels, *[0.0] * (16 - len(levels))], dtype=torch.float32)


def _blocks(stored: Quantised) -> Iterator[Quantised]:
    for start in range(0, max(1, stored.codes.shape[2]), SLOT_BLOCK):
        block = slice(start, start + SLOT_BLOCK)
        codes, scales = stored.codes[:, :, block], stored.scales[:, :, block]
        yield Quantised(codes, scales, stored.signature)


def _check(codec: TurboQuant, given: Tensor, stored: Quantised, length: int) -> None:
    codec.check(stored)
    shape = stored.codes.shape
    if stored.codes.dim() != 4 or given.shape != (*shape[:2], *given.shape[2:3], length):
        raise CacheError(
            f"with codes (batch, kv_heads, slots, row_bytes) of {tuple(shape)} go queries or "
            f"weights (batch, kv_heads, grouped, {length}); {tuple(given.shape)} came; group "
            "query heads by kv head, and pass a weight for every slot"
        )
