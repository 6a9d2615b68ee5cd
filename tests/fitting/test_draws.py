"""Settings that no step could run with are refused when they are read."""

from __future__ import annotations

import math

import pytest

from kvfold.anatomy import anatomy
from kvfold.errors import FitError, KvfoldError, RecipeError
from kvfold.fitting.closed_form import ClosedFormSettings
from kvfold.fitting.distil_settings import DistilSettings
from kvfold.fitting.gates import GateSettings
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.refine import RefineSettings
from kvfold.models import load_config

RECIPE = {
    "name": "odd",
    "model": "tiny-hybrid",
    "plan": "ced-csa2",
    "text": [{"source": "a.txt"}],
    "stages": [{"stage": "closed-form"}],
}


@pytest.mark.parametrize("settings", [DistilSettings, GateSettings, RefineSettings])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"windows": (-1,)}, "windows must be of at least 0"),
        ({"seed": 2**90}, "a seed must be"),
        ({"seed": -1}, "a seed must be"),
        ({"learning_rate": 1e38}, "a learning rate must be"),
        ({"learning_rate": math.nan}, "a learning rate must be"),
        ({"learning_rate": 0.0}, "a learning rate must be"),
    ],
)
def test_what_no_step_can_have_is_refused(settings, values, words):
    with pytest.raises(FitError, match=words):
        settings(**values)


@pytest.mark.parametrize("name", ["ridge", "key_dispersion"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_closed_form_needs_finite_settings(name, value):
    with pytest.raises(FitError, match=name):
        ClosedFormSettings(**{name: value})


@pytest.mark.parametrize(
    "keys",
    [
        {"held_out": math.inf},
        {"held_out": 1e300},
        {"stages": [{"stage": ["distil"]}]},
        {"plan": {"preset": ["x"]}},
        {"memory_limit": "9" * 400},
        {"name": "   "},
    ],
)
def test_a_recipe_with_a_value_that_can_not_be_is_a_recipe_error(keys):
    with pytest.raises(RecipeError):
        Recipe.from_dict({**RECIPE, **keys})


def test_groups_are_checked_before_any_stage_runs():
    shape = anatomy(load_config("tiny-hybrid"))
    recipe = Recipe.from_dict({**RECIPE, "stages": [{"stage": "distil", "groups": [2]}]})
    plan = recipe.plan_for(shape)
    (entry,) = recipe.stages
    with pytest.raises(KvfoldError, match="group of pooling"):
        entry.kind.require(plan, shape, entry.settings)
