"""Counts what a piece of work holds in memory at its highest, and how much it computes.

Every tensor operation passes here. A storage counts from the operation that made it until the
last tensor (or saved activation) that uses it is gone, so the peak is exact to the byte. What is
not seen are buffers that a kernel allocates and frees within one operation.

It counts real work and work on the meta device alike: a dry run is real code on tensors without
data, counted here, and a test can hold one against the other.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.fitting.components_of_memory import component_of
from kvfold.fitting.operations import operations_of
from kvfold.fitting.signatures import Signature

BASE = "base weights"


@dataclass(frozen=True)
class Cost:
    """Of one call. operations: as in `Work`, of a dtype by name; moved: bytes where it has none."""

    dtype: str
    operations: float
    moved: float


@dataclass
class Work:
    """What was computed.

    operations: multiplications and additions of matrix products, attention and factorisations, by
    the name of their dtype. moved: bytes that all other operations read and write. calls: of any
    operation. parts: how often each operation of some shapes was called; all but those that draw at
    random. costs: of one call of each.
    """

    operations: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved: float = 0.0
    calls: float = 0.0
    parts: dict[Signature, float] = field(default_factory=lambda: defaultdict(float))
    costs: dict[Signature, Cost] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Operations of all dtypes."""
        return sum(self.operations.values())


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts within its `with` block.

    counts: which tensors, by their device; all if None. After the block: `peak` bytes, and
    `at_peak`, what they were by component (`kvfold.fitting.components_of_memory`); `work`.
    """

    def __init__(self, counts: Callable[[torch.device], bool] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts or (lambda _: True)
        self.now = self.peak = 0
        self.by_component: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}
        self.work = Work()
        self.times = 1.0
        self._known: dict[int, tuple[int, str]] = {}
        self._names: dict[CodeType, str | None] = {}

    def hold(self, component: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            self._add(tensor, component)

    def rename(self, tensor: Tensor, component: str) -> None:
        """Count a tensor that is known as part of another component."""
        key = tensor.untyped_storage()._cdata
        if key in self._known:
            size, before = self._known[key]
            self.by_component[before] -= size
            self.by_component[component] += size
            self._known[key] = size, component

    @contextmanager
    def repeated(self, times: float) -> Iterator[None]:
        """What is computed inside counts so many times; memory counts as ever."""
        before, self.times = self.times, self.times * times
        try:
            yield
        finally:
            self.times = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count what it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        taken = _tensors((*args, *kwargs.values()))
        made = _tensors((result,))
        inputs = {x.untyped_storage()._cdata for x in taken}
        fresh = [x for x in made if x.untyped_storage()._cdata not in inputs]
        for tensor in fresh:
            self._add(tensor, None)
        self._count(func, args, kwargs, result, taken, made, is_view=not fresh)
        return result

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        taken: list[Tensor],
        made: list[Tensor],
        *,
        is_view: bool,
    ) -> None:
        self.work.calls += self.times
        operations = operations_of(func, args, kwargs, result)
        if operations:
            dtype = next(x.dtype for x in taken if x.is_floating_point())
            cost = Cost(str(dtype).removeprefix("torch."), operations, 0.0)
            self.work.operations[cost.dtype] += operations * self.times
        elif not is_view or func._schema.is_mutable:
            moved = sum(x.numel() * x.element_size() for x in (*taken, *made))
            cost = Cost("", 0.0, moved)
            self.work.moved += moved * self.times
        else:
            return
        signature = Signature.of(func, args, kwargs)
        if signature is not None:
            self.work.parts[signature] += self.times
            self.work.costs[signature] = cost

    def _add(self, tensor: Tensor, component: str | None) -> None:
        if not self.counts(tensor.device):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return
        name = component or self._component()
        self._known[key] = size, name
        weakref.finalize(storage, self._forget, key).atexit = False
        self.now += size
        self.by_component[name] += size
        if self.now > self.peak:
            self.peak = self.now
            self.at_peak = {name: held for name, held in self.by_component.items() if held}

    def _forget(self, key: int) -> None:
        size, name = self._known.pop(key)
        self.now -= size
        self.by_component[name] -= size

    def _component(self) -> str:
        """By the innermost function of kvfold that is running and says what it makes."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if code not in self._names:
                self._names[code] = component_of(code)
            name = self._names[code]
            if name is not None:
                return name
            frame = frame.f_back
        return "other"


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, and those in lists of them: all that an operation takes or makes.

    By hand, since it is done for every operation of a run.
    """
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found
