"""A tensor operation by what its time depends on: which it is, and the shapes that it takes.

Matrix products of one dtype differ in rate by their shapes, attention by its mask and heads,
elementwise operations by how much of a cache they fill and whether they take an exponential. So a
dry run notes every operation with its shapes, and those that matter are timed as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SQUARES = (torch.ops.aten.linalg_cholesky_ex, torch.ops.aten._linalg_eigh)
"""Whose time depends on values: they get a symmetric positive matrix that is not diagonal."""
SEED = 0


@dataclass(frozen=True)
class TensorShape:
    """A tensor without data. stride: in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        """The shape of a strided tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def extent(self) -> int:
        """Elements of the storage that it reaches over."""
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of that storage."""
        return self.extent * self.dtype.itemsize

    def made(self, device: torch.device) -> Tensor:
        """Such a tensor, all ones (a number that no repetition makes slow), or zeros for ids."""
        full = torch.full if self.dtype.is_floating_point else torch.zeros
        value = (1.0,) if self.dtype.is_floating_point else ()
        storage = full((self.extent,), *value, dtype=self.dtype, device=device)
        return storage.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Signature:
    """An operation, its tensors as shapes and everything else as it is. Devices are left out."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature | None:
        """The signature of a call; None for one that draws, or has what can't be compared."""
        if _draws(func, args, kwargs):
            return None
        own = tuple((name, _plain(value)) for name, value in kwargs.items() if name != "device")
        made = cls(func, tuple(map(_plain, args)), own)
        try:
            hash(made)
        except TypeError:
            return None
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it takes."""
        return sum(shape.nbytes for shape in _shapes((self.args, self.kwargs)))

    def call(self, device: torch.device, copies: int = 1) -> Callable[[], object]:
        """The operation itself on tensors of its own, to be timed.

        copies: sets of such tensors, of which each call takes the next, so that it does not find
        what the last one has left in a cache.
        """
        sets = [self._arguments(device) for _ in range(copies)]
        turns = itertools.cycle(sets)

        def call() -> object:
            args, kwargs = next(turns)
            return self.func(*args, **kwargs)

        return call

    def _arguments(self, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
        args = [_made(value, device) for value in self.args]
        kwargs = {name: _made(value, device) for name, value in self.kwargs}
        if any(argument.name == "device" for argument in self.func._schema.arguments):
            kwargs["device"] = device
        if self.func._overloadpacket in SQUARES:
            args[0] = _positive(args[0])
        return args, kwargs


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes numbers from a generator: attention does so for its dropout alone."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorShape.of(value)
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _made(value: Any, device: torch.device) -> Any:
    if isinstance(value, TensorShape):
        return value.made(device)
    return [_made(item, device) for item in value] if isinstance(value, tuple) else value


def _shapes(value: Any) -> list[TensorShape]:
    if isinstance(value, TensorShape):
        return [value]
    return [found for item in value for found in _shapes(item)] if isinstance(value, tuple) else []


def _positive(matrix: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randn(matrix.shape, generator=generator, dtype=torch.float64).to(matrix)
    found: Tensor = drawn @ drawn.mT + matrix.shape[-1] * torch.eye(matrix.shape[-1]).to(matrix)
    return found
