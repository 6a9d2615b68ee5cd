"""A dry run tells the memory and operations that the stages really take."""

from __future__ import annotations

import pytest
import torch

from kvfold.errors import MemoryLimitError, RecipeError
from kvfold.fitting.machine import GPUS, machine_of_rate, measured_machine, named_machine
from kvfold.fitting.predict import BESIDE, DRY, predict
from kvfold.fitting.sizes import parse_bytes, shown_bytes
from kvfold.fitting.stage_table import STAGES

from .dry_models import measured, recipe_of, resident_peak, sized_config

CLOSED_FORM = {"stage": "closed-form"}
DISTIL = {"stage": "distil", "steps": 3, "rows": 2}
CHECKPOINTED = {**DISTIL, "checkpoint_layers": True}
ACCUMULATED = {**DISTIL, "rows_at_once": 1}
REFINE = {"stage": "refine", "steps": 16, "look_every": 16}
POOLED = {"plan": {"preset": "pool", "window": 32}}
GATES = {"stage": "gates", "steps": 16}

NEAR = 0.01
"""Live tensors: ids and other small change are all that a dry run does not have."""
WITHIN = 0.2
"""Resident memory: kernels' own buffers, pages and what the allocator does not give back."""


def predicted(recipe, place="cpu", dtype=torch.float32):
    return predict(recipe, sized_config(), place, dtype)


@pytest.mark.parametrize(
    ("stage", "seq", "keys"),
    [
        (CLOSED_FORM, 256, {}),
        (CLOSED_FORM, 1024, {}),
        (DISTIL, 256, {}),
        (DISTIL, 512, {}),
        (CHECKPOINTED, 512, {}),
        (ACCUMULATED, 512, {}),
        (REFINE, 512, {}),
        (GATES, 512, POOLED),
        (DISTIL, 512, {"plan": {"preset": "8x", "window": 32, "lora": {"rank": 4}}}),
    ],
)
def test_peak_and_operations_are_those_of_the_real_stage(stage, seq, keys):
    recipe = recipe_of(stage, seq, **keys)
    (told,) = predicted(recipe).stages
    real = measured(recipe)
    assert told.whole
    assert told.peak_bytes == pytest.approx(real.peak, rel=NEAR)
    assert dict(told.work.operations) == pytest.approx(dict(real.work.operations), rel=1e-9)
    assert sum(told.components.values()) == told.peak_bytes


@pytest.mark.parametrize("seq", [256, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "stage", [CLOSED_FORM, DISTIL, CHECKPOINTED], ids=["closed-form", "distil", "checkpointed"]
)
def test_a_process_grows_by_what_was_predicted(stage, seq):
    recipe = recipe_of(stage, seq)
    told = predicted(recipe)
    grown = resident_peak(recipe)
    if grown is None:
        pytest.skip("the kernel keeps no highest resident size here")
    (only,) = told.stages
    above = only.peak_bytes - only.components["base weights"] - 4 * told.addon_values
    assert above == pytest.approx(grown, rel=WITHIN)


def test_every_stage_can_be_predicted():
    assert set(DRY) == set(STAGES)


def test_checkpointed_layers_take_less_memory_and_more_operations():
    plain, kept = (predicted(recipe_of(s, 1024)).stages[0] for s in (DISTIL, CHECKPOINTED))
    assert kept.peak_bytes < 0.8 * plain.peak_bytes
    assert kept.work.total > plain.work.total


def test_a_gpu_takes_other_attention_and_half_the_bytes():
    recipe = recipe_of(CHECKPOINTED, 512)
    told = predicted(recipe, "cuda", torch.bfloat16)
    assert 2 * told.base_bytes == pytest.approx(predicted(recipe).base_bytes, rel=1e-3)
    assert told.needed_bytes == told.worst.peak_bytes + BESIDE["cuda"]


def test_too_little_memory_is_refused_with_what_is_needed():
    told = predicted(recipe_of(DISTIL, 256))
    told.require(told.needed_bytes)
    with pytest.raises(MemoryLimitError, match=r"stage distil.*base weights.*checkpoint_layers"):
        told.require(told.needed_bytes - 1)


def test_without_tokens_of_every_text_the_closed_forms_length_is_not_known():
    recipe = recipe_of(CLOSED_FORM, 256, text=[{"source": "somewhere"}])
    (told,) = predicted(recipe).stages
    assert not told.whole
    assert told.seconds(machine_of_rate(1e9)) is None
    known = predicted(recipe_of(CLOSED_FORM, 256)).stages[0]
    assert told.peak_bytes == pytest.approx(known.peak_bytes, rel=NEAR)


def test_time_follows_from_the_machine():
    (told,) = predicted(recipe_of(CLOSED_FORM, 256)).stages
    assert told.seconds(machine_of_rate(1e9)) == pytest.approx(told.work.total / 1e9)
    assert told.seconds(None) is None
    assert told.seconds(named_machine("rtx-4090")) > told.seconds(named_machine("h100"))
    assert all("%" in machine.assumption for machine in GPUS.values())
    here = measured_machine(torch.device("cpu"), [told.work])
    assert told.seconds(here) > 0
    with pytest.raises(RecipeError, match="rtx-3090"):
        named_machine("abacus")


def test_memory_is_read_and_shown():
    assert parse_bytes("24GiB") == 24 * 2**30 == parse_bytes(24 * 2**30)
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert shown_bytes(3 * 2**29) == "1.50 GiB"
    for wrong in ("much", "-1", "3 apples"):
        with pytest.raises(RecipeError, match="24GiB"):
            parse_bytes(wrong)
