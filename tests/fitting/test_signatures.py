"""An operation is known by its shapes, and can be called again on tensors of its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from kvfold.fitting.live_memory import LiveMemory, Work
from kvfold.fitting.machine import COVERED, machine_of_rate, measured_machine
from kvfold.fitting.signatures import Signature

CPU = torch.device("cpu")


def spread(*shape, dtype=torch.float32):
    return torch.linspace(-1, 2, math.prod(shape), dtype=dtype).sin().reshape(shape)


def attended():
    with torch.no_grad():
        heads = [spread(1, count, 8, 16) for count in (4, 2, 2)]
        functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)


def factored():
    matrix = spread(12, 12, dtype=torch.float64)
    factor = torch.linalg.cholesky(matrix @ matrix.T + torch.eye(12))
    torch.cholesky_solve(spread(12, 3, dtype=torch.float64), factor)
    torch.linalg.eigh(matrix + matrix.T)
    torch.linalg.qr(spread(12, 4, dtype=torch.float64))


CALLS = {
    "a product with a turned matrix": lambda: spread(4, 6) @ spread(5, 6).T,
    "attention": attended,
    "factorisations": factored,
    "in place": lambda: spread(4, 4).addmm_(spread(4, 6), spread(6, 4)).mul_(2.0),
    "of several tensors": lambda: torch.cat([spread(2, 3), spread(4, 3)]),
    "of ids": lambda: functional.embedding(torch.tensor([[1, 2]]), spread(7, 3)),
    "with a mask": lambda: spread(3, 4).masked_fill(torch.ones(4, dtype=torch.bool), -torch.inf),
    "new": lambda: torch.zeros(3, 4, device="cpu"),
    "of another dtype": lambda: spread(3).to(torch.bfloat16).float().exp(),
}


def work_of(call):
    with LiveMemory() as meter:
        call()
    return meter.work


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_operation_called_again_is_the_same_one(call):
    found = work_of(call)
    assert found.parts
    for signature in found.parts:
        again = work_of(signature.call(CPU, copies=2))
        assert signature in again.parts
        assert again.costs[signature] == found.costs[signature]


def test_shapes_strides_and_dtypes_tell_operations_apart():
    add = torch.ops.aten.add.Tensor
    x = spread(4, 4)
    others = [(x, x.T), (x[:2], x[:2]), (x.double(), x.double()), (x, 1.0)]
    signatures = {Signature.of(add, args, {}) for args in [(x, x), *others]}
    assert len(signatures) == 5
    assert Signature.of(add, (x + 1, x), {}) in signatures


def test_what_draws_at_random_is_never_called_again():
    work = work_of(lambda: [torch.rand(3), torch.randn(3), torch.ones(3).bernoulli_(0.5)])
    assert [str(signature.func) for signature in work.parts] == ["aten.ones.default"]


def test_a_meta_tensor_has_the_signature_of_a_real_one():
    with torch.device("meta"):
        told = work_of(lambda: torch.empty(4, 6) @ torch.empty(6, 3))
    real = work_of(lambda: spread(4, 6) @ spread(6, 3))
    (product,) = (s for s in real.parts if real.costs[s].operations)
    assert product in told.parts


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_parts_add_up_to_the_whole(call):
    found = work_of(call)
    pairs = [(count, found.costs[signature]) for signature, count in found.parts.items()]
    assert sum(n * cost.operations for n, cost in pairs) == found.total
    assert sum(n * cost.moved for n, cost in pairs) == found.moved


def test_what_was_timed_takes_the_place_of_rates():
    work = work_of(lambda: [spread(4, 6) @ spread(6, 3) for _ in range(3)])
    plain = machine_of_rate(1e3)
    (product,) = (s for s in work.parts if work.costs[s].operations)
    assert plain.seconds(work) == pytest.approx(3 * 2 * 4 * 6 * 3 / 1e3)
    timed = replace(plain, timed={product: 5.0})
    assert timed.seconds(work) == pytest.approx(15.0)
    assert timed.seconds(work_of(lambda: spread(2, 2) @ spread(2, 2))) == pytest.approx(16 / 1e3)


def test_the_machine_at_hand_times_what_takes_most_and_leaves_the_random_state():
    work = work_of(lambda: [spread(64, 96) @ spread(96, 32), spread(512, 512).exp(), factored()])
    before = torch.get_rng_state()
    here = measured_machine(CPU, [work])
    assert torch.equal(before, torch.get_rng_state())
    seconds = {s: n * here.by_rates(work.costs[s]) for s, n in work.parts.items()}
    share = sum(seconds[s] for s in here.timed) / sum(seconds.values())
    assert share >= 0.9 * COVERED
    assert here.seconds(work) > 0
    assert here.seconds(Work()) == 0


@pytest.mark.parametrize(
    ("call", "operations"),
    [
        (lambda: torch.zeros(4, 4).addmm_(spread(4, 6), spread(6, 4)), 2 * 4 * 6 * 4),
        (
            lambda: torch.zeros(2, 4, 4).baddbmm_(spread(2, 4, 6), spread(2, 6, 4)),
            2 * 2 * 4 * 6 * 4,
        ),
        (lambda: torch.linalg.eigh(torch.eye(6)), 9 * 6**3),
    ],
)
def test_linear_algebra_is_counted(call, operations):
    assert work_of(call).total == operations
