"""What is wrong with a recipe for a model, told before any work and without any weights."""

from __future__ import annotations

from pathlib import Path

from kvfold.anatomy import Anatomy
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.row_lengths import check_plan_window, check_windows
from kvfold.plan import Plan


def check_recipe(recipe: Recipe, shape: Anatomy, data: Path | None = None) -> Plan:
    """The plan of a recipe for a model; raises, before any work, what `run_recipe` would.

    Texts are looked at only when they are read.
    """
    plan = check_stages(recipe, shape)
    recipe.text_in(data)
    return plan


def check_stages(recipe: Recipe, shape: Anatomy) -> Plan:
    """`check_recipe` of all but the texts."""
    plan = recipe.plan_for(shape)
    check_plan_window(plan, recipe.seq)
    for entry in recipe.stages:
        entry.kind.require(plan, shape, entry.settings)
        windows = entry.kind.windows(entry.settings)
        check_windows(plan, windows, recipe.seq, f"the stage {entry.name}")
    return plan
