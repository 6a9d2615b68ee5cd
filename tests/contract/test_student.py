"""The dense, differentiable pass that add-ons are trained through computes what is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.fitting.frozen import frozen
from kvfold.runtime.adapters import adapted
from kvfold.runtime.attach import Attachment
from kvfold.runtime.capture import plain_pass
from kvfold.runtime.student import Student

LENGTH = 41
MIXED = ("two-codes",)
"""Plans with codes of both kinds, made of the plain model's activations and of the student's."""


def student_of(case: Any, **settings: Any) -> Student:
    """A student of a case's plan and weights."""
    return Student(case.model, case.anatomy, case.plan, case.addon.pipelines, **settings)


def found_by(student: Student, case: Any, ids: Tensor) -> Any:
    """What the plain model hands to a student."""
    return plain_pass(case.model, case.anatomy, student.sources, ids)[0]


def hidden_of(student: Student, case: Any, ids: Tensor, **settings: Any) -> Tensor:
    """Final hidden states of a student's pass."""
    found = found_by(student, case, ids)
    with student.running():
        hidden: Tensor = student(found, **settings)
    return hidden


def served(attached: Attachment, case: Any, ids: Tensor) -> Tensor:
    """Final hidden states of the attached model, history as the student takes it."""
    lags = [p.depth.needs_window and p.depth.code_width > 0 for p in case.addon.pipelines]
    return attached.hidden_states(ids, history="exact" if any(lags) else "folded")


@pytest.mark.every_family
def test_student_computes_what_the_attached_model_does(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    if method in MIXED:
        pytest.skip("made of two passes; its methods are tested apart")
    made = case(arch, method)
    ids = helpers.tokens(LENGTH, rows=2)
    with torch.no_grad(), frozen(made.model), adapted(made.model, made.addon.lora):
        ours = hidden_of(student_of(made), made, ids)
    with made.attach() as attached:
        theirs = served(attached, made, ids)
    helpers.assert_same(ours, theirs, helpers.tolerance("bits" in str(made.plan.bits)))


@pytest.mark.parametrize("window", [1, 5, 16])
def test_window_of_a_call_takes_the_place_of_the_plans(
    case: Any, helpers: Any, window: int
) -> None:
    made = case("llama", "csa2-joint")
    ids = helpers.tokens(LENGTH)
    with torch.no_grad(), frozen(made.model):
        ours = hidden_of(student_of(made), made, ids, window=window)
    with made.attach(window=window) as attached:
        helpers.assert_same(ours, served(attached, made, ids))


GRADIENTS = (
    ("llama", "ced"),
    ("llama", "csa2-joint"),
    ("llama", "csa2-separate"),
    ("llama", "csa2-residual"),
    ("llama", "ced-csa2"),
    ("llama", "latent"),
    ("llama", "latent-two-codes"),
    ("llama", "latent-of-hidden"),
    ("llama", "pool-token"),
    ("llama", "pool-head-overlap"),
    ("llama", "pool-channel-2"),
    ("llama", "latent+pool"),
    ("qwen3_5", "ced-csa2"),
    ("qwen3_5", "csa2+pool-head"),
    ("qwen3", "latent"),
    ("phi3", "ced"),
    ("phi3", "ced-csa2+lora-qkvo"),
)


DIFFERENCE_STEPS = (2e-5, 5e-5, 1e-4, 2e-4)
"""Norms compute in float32, whose rounding drowns small steps; large ones leave the straight."""


def loss_of(student: Student, found: Any) -> Tensor:
    """Something that depends on every hidden state."""
    hidden = student(found)
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    return (hidden * weights).sum()


def directions_for(weights: list[Any]) -> list[Tensor]:
    """A direction to move each weight in, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights]


def difference(
    student: Student, found: Any, weights: list[Any], directions: list[Tensor], step: float
) -> float:
    """The slope of the loss along directions, by a central difference; weights end as they were."""
    start = [weight.clone() for weight in weights]
    moved = []
    for sign in (1, -1):
        for weight, direction, first in zip(weights, directions, start, strict=True):
            weight.copy_(first + sign * step * direction)
        moved.append(float(loss_of(student, found)))
    for weight, first in zip(weights, start, strict=True):
        weight.copy_(first)
    return (moved[0] - moved[1]) / (2 * step)


@pytest.mark.parametrize(("family", "entry"), GRADIENTS)
def test_gradients_are_those_of_finite_differences(
    case: Any, helpers: Any, family: str, entry: str
) -> None:
    made = case(family, entry)
    student = student_of(made)
    lora = made.addon.lora
    weights = [*made.addon.pipelines.parameters(), *(lora.parameters() if lora else ())]
    terms = adapted(made.model, lora)
    with frozen(made.model), terms, student.running(), torch.enable_grad():
        found = found_by_quietly(student, made, helpers.tokens(LENGTH))
        for weight in weights:
            weight.requires_grad_(True)
        gradients = torch.autograd.grad(loss_of(student, found), weights, allow_unused=True)
        directions = directions_for(weights)
        with torch.no_grad():
            measured = [
                difference(student, found, weights, directions, step) for step in DIFFERENCE_STEPS
            ]
    told = sum(
        float((gradient * direction).sum())
        for gradient, direction in zip(gradients, directions, strict=True)
        if gradient is not None
    )
    for weight in weights:
        weight.requires_grad_(False)
    # A Gated DeltaNet computes in float32 throughout, which leaves the differences noisier.
    relative = 2e-2 if made.anatomy.is_hybrid else 5e-3
    nearest = min(measured, key=lambda slope: abs(slope - told))
    assert told == pytest.approx(nearest, rel=relative, abs=5e-2), measured
    assert abs(told) > 0.5


def found_by_quietly(student: Student, case: Any, ids: Tensor) -> Any:
    """The plain model's activations, though the student's forwards are in place already."""
    from kvfold.anatomy import text_decoder

    decoder = text_decoder(case.model)
    replaced = {m: m.__dict__.pop("forward") for m in decoder.modules() if "forward" in vars(m)}
    try:
        return found_by(student, case, ids)
    finally:
        for module, forward in replaced.items():
            module.forward = forward


@pytest.mark.parametrize("entry", ["csa2-joint", "pool-head", "latent+pool+k8v4"])
def test_no_gradient_reaches_the_base(case: Any, helpers: Any, entry: str) -> None:
    made = case("llama", entry)
    student = student_of(made)
    found = found_by(student, made, helpers.tokens(LENGTH))
    made.addon.pipelines.requires_grad_(True)
    with frozen(made.model), student.running(), torch.enable_grad():
        loss_of(student, found).backward()
    assert all(parameter.grad is None for parameter in made.model.parameters())
    reached = [p for p in made.addon.pipelines.parameters() if p.grad is not None]
    assert reached
    made.addon.pipelines.requires_grad_(False)
    made.addon.pipelines.zero_grad(set_to_none=True)


@pytest.mark.parametrize("entry", ["ced", "csa2-joint", "latent", "pool-head-overlap"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_checkpointed_layers_give_the_same_gradients(
    case: Any, helpers: Any, family: str, entry: str
) -> None:
    made = case(family, entry)
    weights = list(made.addon.pipelines.requires_grad_(True).parameters())
    found = []
    for checkpointed in (False, True):
        student = student_of(made, checkpoint_layers=checkpointed)
        before = found_by(student, made, helpers.tokens(LENGTH))
        with frozen(made.model), student.running(), torch.enable_grad():
            loss = loss_of(student, before)
            found.append(torch.autograd.grad(loss, weights, allow_unused=True))
    made.addon.pipelines.requires_grad_(False)
    for plain, again in zip(*found, strict=True):
        assert (plain is None) == (again is None)
        if plain is not None and again is not None:
            helpers.assert_same(again, plain, 1e-6)


def test_forwards_are_restored_after_a_failure(case: Any, helpers: Any) -> None:
    made = case("llama", "csa2-joint")
    student = student_of(made, checkpoint_layers=True)
    with pytest.raises(KeyError), student.running():
        student({})
    assert not any("forward" in vars(module) for module in made.model.modules())
    assert not any(module._forward_pre_hooks for module in made.model.modules())
