"""The recipes that come with the project can be run as they are, and are called as their files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.errors import MemoryLimitError, MissingExtraError
from kvfold.fitting.packing import load_documents
from kvfold.fitting.predict import predict
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.recipe_checks import check_recipe
from kvfold.fitting.sizes import parse_bytes
from kvfold.models import load_config

from .published import PUBLISHED, published_config

FOLDER = Path(__file__).parents[1] / "training"
RECIPES = sorted((FOLDER / "recipes").glob("*.yaml"))


def config_of(recipe):
    """The model's configuration; that of a published model as it was published."""
    name = recipe.model_name.rsplit("/", 1)[-1]
    return published_config(name) if name in PUBLISHED else load_config(recipe.model_name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_model(path):
    recipe = Recipe.from_file(path)
    assert recipe.name == path.stem
    try:
        shape = anatomy(config_of(recipe))
    except MissingExtraError as error:
        pytest.skip(str(error))
    plan = check_recipe(recipe, shape, Path("somewhere"))
    assert plan.folded_layers
    assert f"--recipe training/recipes/{path.name} --data DATA" in path.read_text()


def test_no_recipe_trains_on_what_is_measured():
    sources = {part.name for path in RECIPES for part in Recipe.from_file(path).text}
    assert len(RECIPES) >= 5
    assert not {source for source in sources if "test" in source}


@pytest.mark.slow
def test_the_24_gb_recipe_fits_with_room_to_spare_and_would_not_without_checkpointing():
    recipe = Recipe.from_file(FOLDER / "recipes" / "qwen3.5-4b-24gb.yaml")
    limit = parse_bytes(recipe.memory_limit)
    assert limit <= 22 * 2**30
    config, dtype = published_config("Qwen3.5-4B"), getattr(torch, recipe.dtype)
    told = predict(recipe, config, "cuda", dtype)
    told.require(limit)
    assert told.base_bytes == pytest.approx(2 * 4.2e9, rel=0.01)
    *_, distil = recipe.to_dict()["stages"]
    keeping = {**recipe.to_dict(), "stages": [{**distil, "checkpoint_layers": False}]}
    with pytest.raises(MemoryLimitError, match="stage distil is predicted to need"):
        predict(Recipe.from_dict(keeping), config, "cuda", dtype).require(24 * 2**30)


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
