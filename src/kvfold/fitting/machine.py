"""How fast a machine is: what turns counted work into seconds.

The machine at hand is measured for a few seconds; another is taken from a table of published
figures and a stated share of them. Time is then

    operations / operations a second  +  bytes moved / bytes a second  +  calls * time of a call

each as `kvfold.fitting.live_memory.Work` counts it. It is an estimate; memory is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from kvfold.errors import RecipeError
from kvfold.fitting.live_memory import Work

EFFICIENCY = 0.4
"""Share of a GPU's published rates that training in bfloat16 is taken to reach."""
CALL = 1e-5
"""Seconds that an operation takes at least on a GPU: that of starting it from Python."""
SIZE = 1024
"""Rows and columns of the matrices that are multiplied to measure."""
LEAST_SECONDS = 0.4
"""For which a rate is measured."""
MEASURED = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Machine:
    """Rates of a machine, and where they come from.

    operations: multiplications and additions a second, by dtype. bandwidth: bytes a second. call:
    seconds of an operation beside its arithmetic.
    """

    name: str
    operations: Mapping[str, float]
    bandwidth: float
    call: float
    assumption: str

    def seconds(self, work: Work) -> float:
        """How long some work takes."""
        products = sum(n / self.operations[dtype] for dtype, n in work.operations.items())
        return products + work.moved / self.bandwidth + work.calls * self.call


def _gpu(name: str, half: float, single: float, double: float, bandwidth: float) -> Machine:
    """Published peaks in tera-operations a second, dense, without tensor cores but for half."""
    share = 1e12 * EFFICIENCY
    rates = {
        "bfloat16": half * share,
        "float16": half * share,
        "float32": single * share,
        "float64": double * share,
    }
    said = (
        f"{name}: {EFFICIENCY:.0%} of its published {half:g} (half), {single:g} (float32) and "
        f"{double:g} (float64) tera-operations and {bandwidth:g} GB a second"
    )
    return Machine(name, rates, bandwidth * 1e9 * EFFICIENCY, CALL, said)


GPUS: Mapping[str, Machine] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            _gpu("rtx-3090", 71, 35.6, 0.56, 936),
            _gpu("rtx-4090", 165, 82.6, 1.29, 1008),
            _gpu("l4", 121, 30.3, 0.47, 300),
            _gpu("a10", 125, 31.2, 0.98, 600),
            _gpu("a100", 312, 19.5, 9.7, 1555),
            _gpu("h100", 989, 67, 34, 3350),
        )
    }
)
"""By name. Sources: the makers' data sheets."""


def named_machine(name: str) -> Machine:
    """A machine of the table; raises `RecipeError` for another name."""
    if name.lower() not in GPUS:
        raise RecipeError(f"a machine is one of {', '.join(GPUS)}; got {name!r}")
    return GPUS[name.lower()]


def machine_of_rate(operations_per_second: float) -> Machine:
    """A machine of one rate for all dtypes, and nothing else counted."""
    rates = dict.fromkeys(MEASURED, operations_per_second)
    said = f"{operations_per_second:g} operations a second in every dtype, and nothing beside them"
    return Machine("as given", rates, float("inf"), 0.0, said)


def measured_machine(device: torch.device, dtypes: frozenset[str]) -> Machine:
    """The machine at hand, measured for some seconds. dtypes: those that are needed, by name."""
    rates = {name: _product_rate(device, getattr(torch, name)) for name in sorted(dtypes)}
    said = ", ".join(f"{rate / 1e9:,.0f} G operations a second in {n}" for n, rate in rates.items())
    return Machine(
        "this machine",
        rates,
        _bandwidth(device),
        _call_seconds(device),
        f"measured on this machine ({device}): {said}",
    )


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    left = torch.ones(SIZE, SIZE, device=device, dtype=dtype)
    return 2 * SIZE**3 / _seconds(device, lambda: left @ left)


def _bandwidth(device: torch.device) -> float:
    """Of an addition that makes a new tensor: what most operations are."""
    one = torch.ones(2**22, device=device)
    return 3 * one.nbytes / _seconds(device, lambda: one + one)


@torch.no_grad()
def _call_seconds(device: torch.device) -> float:
    """Of small operations as modules call them, some of which are views."""
    layer = nn.Linear(8, 8).to(device)
    row = torch.ones(1, 8, device=device)
    calls = 5
    return _seconds(device, lambda: layer(row).view(8).mul(2.0)[:4].view(2, 2)) / calls


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of one turn: the least mean of three measurements, after one that is not counted."""
    work()
    means = []
    for _ in range(3):
        turns, started = 0, _now(device)
        while _now(device) - started < LEAST_SECONDS / 3:
            work()
            turns += 1
        means.append((_now(device) - started) / turns)
    return min(means)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
