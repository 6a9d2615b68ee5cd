"""The recipes that come with the project can be run as they are, and are called as their files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kvfold.anatomy import anatomy
from kvfold.errors import MissingExtraError
from kvfold.fitting.packing import load_documents
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.stages import check_recipe
from kvfold.models import load_config

FOLDER = Path(__file__).parents[1] / "training"
RECIPES = sorted((FOLDER / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_model(path):
    recipe = Recipe.from_file(path)
    assert recipe.name == path.stem
    try:
        shape = anatomy(load_config(recipe.model_name))
    except MissingExtraError as error:
        pytest.skip(str(error))
    plan = check_recipe(recipe, shape, Path("somewhere"))
    assert plan.folded_layers
    assert f"--recipe training/recipes/{path.name} --data DATA" in path.read_text()


def test_no_recipe_trains_on_what_is_measured():
    sources = {part.name for path in RECIPES for part in Recipe.from_file(path).text}
    assert len(RECIPES) >= 5
    assert not {source for source in sources if "test" in source}


def test_tales_are_documents_that_the_tiny_hybrid_knows(tmp_path):
    spec = importlib.util.spec_from_file_location("tales", FOLDER / "tales.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "tales.jsonl").write_text(module.tales(20))
    records = [json.loads(line) for line in module.tales(20).splitlines()]
    assert len({record["text"] for record in records}) == 20
    assert {len(record["text"].split()) for record in records} == {1024}
    documents = load_documents(tmp_path / "tales.jsonl", None)
    assert len(documents.held_out) == 2
