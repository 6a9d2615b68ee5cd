"""TurboQuant: vectors in 1 to 8 bits a value, with no calibration (arXiv 2504.19874).

A vector's norm is taken out, the rest is turned by a seeded random rotation, after which its
coordinates look normal whatever they were before, and each is rounded to a Lloyd-Max level. There
is no second (QJL) stage: it would make inner products unbiased, but its noise hurts a softmax.

Two things differ from the paper. Widths need not be powers of two (see `_mixers`). And the stored
scale gives the decoded vector the norm of the original, where the paper's has the least squared
error but is shorter: at 1 bit by a fifth, which flattens attention. The angle between the two is
the same: with D the codebook's distortion, sin^2 of it is D and the relative squared error
2 - 2 sqrt(1 - D) instead of D.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.errors import CacheError, PlanError
from kvfold.methods.codebooks import levels, nearest

VERSION = 1
"""Raised when the same settings would give other codes, so that older codes are refused."""
DENSE_WIDTH = 256
"""Up to here one matrix product is the fastest rotation; above, products by factors are."""
FACTOR_BITS = 6
"""A Hadamard factor is at most 2**FACTOR_BITS wide."""
PLANES = (8, 4, 2, 1)
"""Codes are cut into fields of so many bits, low bits first, that fill whole bytes."""
SCALE_BYTES = 2
LARGEST_SCALE = torch.finfo(torch.float16).max
"""A scale is close to the root mean square of the vector's values."""
UNIFORM_BITS = 8
"""At this width codes are signed integers and levels a uniform grid."""
UNIFORM_LEVEL = 1 / 32
"""Distance of uniform levels. 127 of them reach 3.97, so that a scale is close to the rms."""
UNIFORM_MAXIMUM = 127


@dataclass(frozen=True)
class Quantised:
    """Packed vectors: what a cache stores.

    codes: (..., row_bytes), uint8. scales: (..., 1), float16; NaN where the vector was not finite,
    infinite where it was above `LARGEST_SCALE`. signature: that of the `TurboQuant` that made them.
    """

    codes: Tensor
    scales: Tensor
    signature: str

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class TurboQuant:
    """Vectors of `width` values in `bits` bits each and one float16 scale a vector.

    Works on any device; in float64 for float64 vectors, else in float32. `seed` picks the
    rotation: codes can be read only with the seed that made them. Raises `PlanError` for a
    width below 1 or bits outside 1 to 8.

    A vector whose values are near 1e-4 or 1e4 keeps its norm within 2**-10. Above `LARGEST_SCALE`
    the scale is infinite; below the smallest normal float16, 6.1e-5, the norm gets coarser.
    """

    width: int
    bits: int
    seed: int

    def __post_init__(self) -> None:
        if not _is_whole(self.bits) or not 1 <= self.bits <= 8:
            raise PlanError(
                f"bits must be a whole number from 1 to 8; {self.bits!r} came; choose one of those"
            )
        if not _is_whole(self.width) or self.width < 1:
            raise PlanError(
                f"a vector's width must be a whole number, at least 1; {self.width!r} came; give "
                "the number of values that share a scale"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one vector's codes: width * bits / 8 where width is a multiple of 8.

        Other widths round each field of `PLANES` up to whole bytes.
        """
        return sum(_plane_bytes(self.width, plane) for plane in _planes(self.bits))

    @property
    def bits_per_value(self) -> float:
        """Bits stored for a value, the scale's share included."""
        return 8 * (self.row_bytes + SCALE_BYTES) / self.width

    @property
    def signature(self) -> str:
        """Names everything that codes depend on."""
        return f"turboquant-{VERSION} width={self.width} bits={self.bits} seed={self.seed}"

    def rotate(self, x: Tensor) -> Tensor:
        """`x R^T` with R orthogonal: x (..., width) to the same shape and dtype."""
        self._check_width(x)
        work = x.to(math_dtype(x.dtype))
        if self.width <= DENSE_WIDTH:
            turned = work @ _dense(self.width, self.seed, x.device, work.dtype)
        else:
            turned = _mix(work * _signs(self.width, self.seed, x.device, work.dtype))
        return turned.to(x.dtype)

    def unrotate(self, x: Tensor) -> Tensor:
        """`x R`, which undoes `rotate`: x (..., width) to the same shape and dtype."""
        self._check_width(x)
        work = x.to(math_dtype(x.dtype))
        if self.width <= DENSE_WIDTH:
            turned = work @ _dense(self.width, self.seed, x.device, work.dtype).T
        else:
            turned = _mix(work) * _signs(self.width, self.seed, x.device, work.dtype)
        return turned.to(x.dtype)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Quantised:
        """x: (..., width), any floating dtype. Raises `CacheError` for another width or dtype.

        Never waits for the device. A vector with a NaN or an infinity gets a NaN scale, and one
        that is too large an infinite one, so that whoever runs a step can look for them with
        `isfinite(scales)`, once a step.
        """
        self._check_width(x)
        if not x.is_floating_point():
            raise CacheError(
                f"vectors to quantise must be floating-point; {x.dtype} came; pass the values"
            )
        work = x.to(math_dtype(x.dtype))
        tiny = torch.finfo(work.dtype).tiny
        # Relative to the largest value no square overflows, and infinities turn into NaN.
        peak = work.abs().amax(-1, keepdim=True)
        turned = self.rotate(work / peak.clamp_min(tiny))
        norm = torch.linalg.vector_norm(turned, dim=-1, keepdim=True)
        rows, code_norm = self._nearest(turned, norm.clamp_min(tiny))
        scales = peak * (norm / code_norm)
        return Quantised(rows, scales.to(torch.float16), self.signature)

    def decode(self, stored: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vectors, (..., width). Raises `CacheError` for codes of other settings."""
        return self.unrotate(self._decode_rotated(stored, math_dtype(dtype))).to(dtype)

    def decode_rotated(self, stored: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
        """The rotated vectors, (..., width): their product with a rotated query is the query's
        with the vectors. Raises `CacheError` for codes of other settings.
        """
        return self._decode_rotated(stored, math_dtype(dtype)).to(dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """x (..., width) as its codes give it back, for training through them.

        Rounding has no slope, so gradients pass as if nothing had been rounded (the
        straight-through estimator of Bengio et al., arXiv 1308.3432).
        """
        back = self.decode(self.encode(x.detach()), dtype=x.dtype)
        return x + (back - x.detach())

    def check(self, stored: Quantised) -> None:
        """Raise `CacheError` unless `stored` was made with these settings."""
        if stored.signature != self.signature:
            raise CacheError(
                f"codes must be read with the settings that made them ({stored.signature}); "
                f"these are {self.signature}; use the plan that the cache was made with"
            )
        if (
            stored.codes.dtype != torch.uint8
            or stored.codes.shape[-1:] != (self.row_bytes,)
            or stored.scales.shape != (*stored.codes.shape[:-1], 1)
        ):
            raise CacheError(
                f"codes must be uint8 of shape (..., {self.row_bytes}) with scales (..., 1); "
                f"{stored.codes.dtype} {tuple(stored.codes.shape)} with "
                f"{tuple(stored.scales.shape)} came; slice both alike, never the last axis"
            )

    def _decode_rotated(self, stored: Quantised, dtype: torch.dtype) -> Tensor:
        self.check(stored)
        scales = stored.scales.to(dtype)
        if self.bits == UNIFORM_BITS:
            return stored.codes.view(torch.int8).to(dtype) * (scales * UNIFORM_LEVEL)
        codes = unpack(stored.codes, self.bits, self.width)
        return levels(codes, self.bits, dtype).mul_(scales)

    def _nearest(self, turned: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (..., row_bytes) of the nearest levels, and those levels' norm (..., 1)."""
        if self.bits == UNIFORM_BITS:
            # A step of the vector's own beats a fixed range at every width: 3.5e-5 against 7.6e-5
            # of relative squared error at width 64, 6.3e-5 against 8.8e-5 at 1152.
            tiny = torch.finfo(turned.dtype).tiny
            most = turned.abs().amax(-1, keepdim=True)
            rounded = (turned * (UNIFORM_MAXIMUM / most.clamp_min(tiny))).round_().nan_to_num_()
            code_norm = torch.linalg.vector_norm(rounded, dim=-1, keepdim=True) * UNIFORM_LEVEL
            return rounded.to(torch.int8).view(torch.uint8), code_norm.clamp_min(tiny)
        codes = nearest(turned * (math.sqrt(self.width) / norm), self.bits)
        chosen = levels(codes, self.bits, turned.dtype)
        code_norm = torch.linalg.vector_norm(chosen, dim=-1, keepdim=True)
        return pack(codes.to(torch.uint8), self.bits), code_norm

    def _check_width(self, x: Tensor) -> None:
        if x.shape[-1:] != (self.width,):
            raise CacheError(
                f"vectors must be {self.width} wide; {tuple(x.shape)} came; quantise with a "
                "TurboQuant of that width"
            )


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., width), uint8 below 2**bits, to rows of bytes (..., row_bytes).

    Codes are cut into fields as in `PLANES`. A field of p bits takes n = ceil(width * p / 8)
    bytes; byte j holds, from its low bits on, the field of values j, j + n, j + 2n, ... Reading a
    plane is then whole-byte shifts and masks that give neighbouring values.
    """
    width, parts, shift = codes.shape[-1], [], 0
    for plane in _planes(bits):
        field = codes if plane == bits else (codes >> shift) & (2**plane - 1)
        count, slices = _plane_bytes(width, plane), 8 // plane
        if count * slices != width:
            field = functional.pad(field, (0, count * slices - width))
        packed = field[..., :count]
        for i in range(1, slices):
            packed = packed | (field[..., i * count : (i + 1) * count] << (plane * i))
        parts.append(packed)
        shift += plane
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unpack(rows: Tensor, bits: int, width: int) -> Tensor:
    """Undo `pack`: rows (..., row_bytes) to codes (..., width)."""
    fields, shift, start = [], 0, 0
    for plane in _planes(bits):
        count = _plane_bytes(width, plane)
        part = rows[..., start : start + count]
        slices = [(part >> (plane * i)) & (2**plane - 1) for i in range(8 // plane)]
        field = torch.cat(slices, dim=-1)[..., :width]
        fields.append(field << shift if shift else field)
        shift, start = shift + plane, start + count
    return functools.reduce(torch.bitwise_or, fields)


def _planes(bits: int) -> tuple[int, ...]:
    return tuple(plane for plane in PLANES if bits & plane)


def _plane_bytes(width: int, plane: int) -> int:
    return -(-width * plane // 8)


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """What vectors of a dtype are computed in: float64 for that, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mix(x: Tensor) -> Tensor:
    """x (..., width) times the symmetric orthogonal matrix that `_mixers` factors."""
    shape, after = x.shape, 1
    for mixer in reversed(_mixers(shape[-1], x.device, x.dtype)):
        size = len(mixer)
        x = x.reshape(-1, size) @ mixer if after == 1 else mixer @ x.reshape(-1, size, after)
        after *= size
    return x.reshape(shape)


@functools.cache
def _mixers(width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Symmetric orthogonal matrices whose Kronecker product mixes `width` values.

    With width = m 2^k, m odd: a discrete Hartley matrix of m and Hadamard matrices, themselves
    Kronecker powers of the Hartley matrix of 2. Every output takes from every input, which
    blocks of powers of two (1152 = 1024 + 128) don't give: where the first half of the values
    carries the energy, those double the error.
    """
    odd, power = width, 0
    while odd % 2 == 0:
        odd, power = odd // 2, power + 1
    pieces = -(-power // FACTOR_BITS)
    exponents = [power // pieces + (i < power % pieces) for i in range(pieces)]
    factors = [_hadamard(2**exponent) for exponent in exponents]
    if odd > 1 or not factors:
        factors.insert(0, _hartley(odd))
    with torch.inference_mode(mode=False):
        return tuple(factor.to(device, dtype, copy=True) for factor in factors)


def _hartley(size: int) -> Tensor:
    """cos + sin of 2 pi i j / size, over sqrt(size): symmetric and orthogonal."""
    steps = torch.arange(size)
    angle = torch.outer(steps, steps).remainder(size).double() * (2 * math.pi / size)
    return (angle.cos() + angle.sin()) / math.sqrt(size)


def _hadamard(size: int) -> Tensor:
    made, two = _hartley(1), _hartley(2)
    while len(made) < size:
        made = torch.kron(two, made)
    return made


@functools.cache
def _signs(width: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random signs (width,), the same on every machine and release."""
    name = f"kvfold turboquant {VERSION} {width} {seed}".encode()
    drawn = hashlib.shake_256(name).digest(width)
    with torch.inference_mode(mode=False):
        return torch.tensor([1 - 2 * (byte & 1) for byte in drawn], device=device, dtype=dtype)


@functools.cache
def _dense(width: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """R^T as one matrix, (width, width)."""
    cpu = torch.device("cpu")
    with torch.inference_mode(mode=False):
        signs = _signs(width, seed, cpu, torch.float64)
        mixed = functools.reduce(torch.kron, _mixers(width, cpu, torch.float64))
        return (signs[:, None] * mixed).to(device, dtype).contiguous()
