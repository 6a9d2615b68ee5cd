"""How fast a machine is: what turns counted work into seconds.

The machine at hand is measured for a few seconds: the operations that take most are each timed as
they are, on tensors of their own shapes (`kvfold.fitting.signatures`), and all others go by rates.
Another machine is taken from a table of published figures and a stated share of them. The time of
work that goes by rates is

    operations / operations a second  +  bytes moved / bytes a second

each as `kvfold.fitting.live_memory.Work` counts it, and every call takes some time beside it. It is
an estimate; memory is not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from kvfold.errors import RecipeError
from kvfold.fitting.live_memory import Cost, LiveMemory, Work
from kvfold.fitting.signatures import Signature

EFFICIENCY = 0.4
"""Share of a GPU's published rates that training in bfloat16 is taken to reach."""
CALL = 1e-5
"""Seconds that an operation takes at least on a GPU: that of starting it from Python."""
SIZE = 1024
"""Rows and columns of the matrices that are multiplied to measure."""
LEAST_SECONDS = 0.4
"""For which a rate is measured."""
TIMED_SECONDS = 0.03
"""For which an operation is timed, or once if it takes longer."""
COVERED = 0.99
"""Share of the time, by rates, that operations timed as they are take together."""
LONG = 1.0
"""Seconds of an operation that is timed once."""
MOST_TIMED = 96
MOST_COPIES = 64
LARGEST = 2**30
"""Bytes of an operation's tensors, at most, if it is to be timed as it is."""
SMALLEST: Mapping[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
"""A model whose time is that of calling its operations."""
AMONG_WORK = 2.0
"""Times longer a call takes between operations that fill the caches than in such a model: what the
stages of `benchmarks/predict_table.py` took beside their operations."""
CACHE = 2**26
"""Bytes that no cache holds: weights and activations come from memory, most often. In products of
a few hundred rows too that is a fifth of the time."""
MEASURED = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Machine:
    """Rates of a machine, and where they come from.

    operations: multiplications and additions a second, by dtype. bandwidth: bytes a second. call:
    seconds of an operation beside its arithmetic. timed: seconds of operations that were measured
    as they are, beside that of a call.
    """

    name: str
    operations: Mapping[str, float]
    bandwidth: float
    call: float
    assumption: str
    timed: Mapping[Signature, float] = field(default_factory=dict)

    def seconds(self, work: Work) -> float:
        """How long some work takes."""
        products = sum(n / self.operations[dtype] for dtype, n in work.operations.items())
        total = products + work.moved / self.bandwidth + work.calls * self.call
        for signature, seconds in self.timed.items():
            if signature in work.parts:
                by_rates = self.by_rates(work.costs[signature])
                total += work.parts[signature] * (seconds - by_rates)
        return total

    def by_rates(self, cost: Cost) -> float:
        """Seconds of one call by the machine's rates."""
        if cost.operations:
            return cost.operations / self.operations[cost.dtype]
        return cost.moved / self.bandwidth


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


def measured_machine(device: torch.device, work: Iterable[Work]) -> Machine:
    """The machine at hand, measured for some seconds. work: what it is measured for."""
    work = list(work)
    plain = machine_by_rates(device, sorted({dtype for one in work for dtype in one.operations}))
    timed = {
        signature: max(0.0, seconds - plain.call / AMONG_WORK)
        for signature in _costliest(plain, work)
        if (seconds := _timed(device, signature)) is not None
    }
    return replace(
        plain,
        timed=timed,
        assumption=f"{plain.assumption}, and {len(timed)} operations as they are",
    )


def machine_by_rates(device: torch.device, dtypes: Iterable[str]) -> Machine:
    """The machine at hand by its rates alone. dtypes: whose products are timed."""
    rates = {name: _product_rate(device, getattr(torch, name)) for name in dtypes}
    said = ", ".join(f"{rate / 1e9:,.0f} G operations a second in {n}" for n, rate in rates.items())
    return Machine(
        "this machine",
        rates,
        _bandwidth(device),
        AMONG_WORK * _call_seconds(device),
        f"measured on this machine ({device}): {said}",
    )


def _costliest(machine: Machine, work: Iterable[Work]) -> list[Signature]:
    """The operations that take most of the time by a machine's rates, the longest first."""
    seconds: dict[Signature, float] = {}
    for one in work:
        for signature, count in one.parts.items():
            own = count * machine.by_rates(one.costs[signature])
            seconds[signature] = seconds.get(signature, 0.0) + own
    chosen, taken, total = [], 0.0, sum(seconds.values())
    for signature in sorted(seconds, key=lambda one: -seconds[one])[:MOST_TIMED]:
        if taken >= COVERED * total:
            break
        taken += seconds[signature]
        chosen.append(signature)
    return chosen


@torch.no_grad()
def _timed(device: torch.device, signature: Signature) -> float | None:
    """Seconds of one call on tensors in no cache; None for what refuses made-up ones."""
    size = signature.nbytes
    if size > LARGEST:
        return None
    copies = min(MOST_COPIES, -(-CACHE // max(1, size)))
    try:
        return _seconds(device, signature.call(device, copies), TIMED_SECONDS)
    except Exception:  # noqa: BLE001 - an operation may refuse made-up values in any way
        return None


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    left = torch.ones(SIZE, SIZE, device=device, dtype=dtype)
    return 2 * SIZE**3 / _seconds(device, lambda: left @ left)


def _bandwidth(device: torch.device) -> float:
    """Of an addition that makes a new tensor: what most operations are."""
    one, other = torch.ones(2**22, device=device), torch.ones(2**22, device=device)
    return 3 * one.nbytes / _seconds(device, lambda: one + other)


@torch.no_grad()
def _call_seconds(device: torch.device) -> float:
    """Of one operation as models call them, views too: of a model in which it computes nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig

    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config(**SMALLEST))
    model = model.eval().to(device)
    ids = torch.ones(1, 2, dtype=torch.int64, device=device)
    with LiveMemory() as meter:
        model(ids, use_cache=False)
    calls: float = meter.work.calls
    return _seconds(device, lambda: model(ids, use_cache=False)) / calls


def _seconds(
    device: torch.device, work: Callable[[], object], least: float = LEAST_SECONDS
) -> float:
    """Of one turn: the middle one of three means, after a turn that is not counted.

    least: seconds that all of it takes. The clock is read after several turns, since reading it
    means waiting for a GPU. What takes `LONG` is measured once: a short pause of the machine, which
    would be taken for the time of every such operation, is little beside it.
    """
    work()
    turns, spent = 1, _turns(device, work, 1)
    while spent < least / 3:
        turns = max(turns + 1, math.ceil(turns * min(10.0, least / 3 / max(spent, 1e-9))))
        spent = _turns(device, work, turns)
    again = 0 if spent > LONG else 2
    return statistics.median([spent, *(_turns(device, work, turns) for _ in range(again))]) / turns


def _turns(device: torch.device, work: Callable[[], object], turns: int) -> float:
    started = _now(device)
    for _ in range(turns):
        work()
    return _now(device) - started


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
