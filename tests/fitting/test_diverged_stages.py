"""A stage whose loss is no number is refused alone: it takes neither the run nor weights along."""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.errors import DivergedError, FitError
from kvfold.fitting import descent, distil
from kvfold.fitting.distil_settings import DistilSettings
from kvfold.fitting.refine import RefineSettings, refine
from kvfold.fitting.stages import recipe_text
from kvfold.store.addon import AddOn

from .tiny_recipes import Letters, Stop, made_recipe, run, same_weights, stopping

CLOSED = {"stage": "closed-form", "tokens": 1920}
GATES = {"stage": "gates", "steps": 6, "queries": 16}
REFINE = {"stage": "refine", "steps": 6, "look_every": 2, "queries": 16}
DISTIL = {"stage": "distil", "steps": 6, "rows": 1, "look_every": 2}
LATER = {"stage": "gates", "steps": 2, "queries": 16}


def far_from(step):
    """A learning rate that from some step on is beyond all bounds."""
    return lambda self, number: self.learning_rate if number < step else math.inf


@pytest.fixture
def runaway(monkeypatch):
    """Rates of refining, gates and distilling that are far too high from the second step on."""
    monkeypatch.setattr(descent.Descent, "rate", far_from(1))
    monkeypatch.setattr(DistilSettings, "rate", far_from(1))


@pytest.fixture(scope="module")
def calm(model, data, tmp_path_factory):
    return run(model, data, tmp_path_factory.mktemp("calm"), made_recipe(stages=[CLOSED]))


@pytest.mark.parametrize("stage", [GATES, REFINE, DISTIL], ids=lambda stage: stage["stage"])
def test_a_diverged_stage_is_not_kept_and_later_ones_go_on(
    model, data, tmp_path, runaway, calm, stage
):
    lines = []
    chosen = made_recipe(stages=[CLOSED, stage, CLOSED])
    made = run(model, data, tmp_path / "work", chosen, log=lines.append)
    first, second, third = made.report["stages"]
    assert first["kept"]
    assert (second["kept"], second["kl_after"], second["report"]) == (False, None, {})
    assert "must be finite" in second["why"]
    assert "take a learning_rate below" in second["why"]
    assert third["kl_after"] == first["kl_after"]  # it ran, from the weights before the second
    assert same_weights(made, calm)
    assert [line["kept"] for line in lines if line.get("event") == "end"] == [True, False, False]
    assert not list((tmp_path / "work").glob("*.checkpoint"))


def test_a_run_killed_after_a_diverged_stage_ends_as_an_unbroken_one(
    model, data, tmp_path, runaway, calm, monkeypatch
):
    chosen = made_recipe(stages=[CLOSED, DISTIL, LATER])
    with monkeypatch.context() as patched:
        stopping(patched, descent.AttentionDescent, "step", 0)
        with pytest.raises(Stop):
            run(model, data, tmp_path / "work", chosen)
    monkeypatch.setattr(distil.Distiller, "step", None)
    made = run(model, data, tmp_path / "work", chosen)
    assert "must be finite" in made.report["stages"][1]["why"]


def test_called_alone_a_training_that_diverges_says_so(model, data, tmp_path, runaway, calm):
    text = recipe_text(made_recipe(), model, Letters(), tmp_path, data=data)
    before = [weight.clone() for weight in calm.parameters()]
    calm.save_pretrained(tmp_path / "addon")
    addon = AddOn.from_pretrained(tmp_path / "addon", dtype=model.dtype)
    settings = RefineSettings(steps=6, queries=16)
    with pytest.raises(DivergedError, match="take a learning_rate below"):
        refine(model, addon, *text, settings, progress=False)
    assert all(map(torch.equal, addon.parameters(), before))


def test_weights_that_are_broken_from_the_start_are_not_blamed_on_the_learning_rate(
    model, data, tmp_path
):
    text = recipe_text(made_recipe(), model, Letters(), tmp_path, data=data)
    addon = AddOn.untrained(model, made_recipe().plan_for(distil.anatomy(model)))
    for weight in addon.parameters():
        weight.fill_(math.nan)
    for stage, settings in ((refine, RefineSettings(steps=2)), (distil.distil, DistilSettings())):
        with pytest.raises(DivergedError, match="solve for the maps first"):
            stage(model, addon, *text, settings, progress=False)


def test_a_run_whose_every_stage_failed_ends_with_all_reasons(
    model, data, tmp_path, runaway, monkeypatch
):
    def broken(model, plan):
        made = real(model, plan)
        for weight in made.parameters():
            weight.fill_(math.nan)
        return made

    real = AddOn.untrained
    monkeypatch.setattr(AddOn, "untrained", broken)
    chosen = made_recipe(stages=[REFINE, DISTIL])
    with pytest.raises(FitError, match=r"refine: .*must be finite.*distil: .*must be finite"):
        run(model, data, tmp_path / "work", chosen)
