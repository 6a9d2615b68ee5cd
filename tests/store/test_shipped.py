"""Add-ons that come with the package: named like folders, made by recipes, of their own bases."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.errors import AddOnError
from kvfold.fitting.recipe import Recipe
from kvfold.models import tiny_hybrid
from kvfold.runtime.attach import attach
from kvfold.store.addon import AddOn
from kvfold.store.shipped import shipped, shipped_folder

RECIPES = Path(__file__).parents[2] / "training" / "recipes"
LARGEST = 9_000_000


@pytest.mark.parametrize("name", shipped())
def test_each_is_what_its_recipe_makes(name: str) -> None:
    addon = AddOn.from_pretrained(name)
    recipe = Recipe.from_file(RECIPES / f"{name}.yaml")
    assert Recipe.from_dict(addon.report["recipe"]) == recipe
    assert all(stage["kept"] for stage in addon.report["stages"])
    folder = shipped_folder(name)
    assert folder is not None
    assert (folder / "README.md").read_text().count(name) > 0
    assert sum(file.stat().st_size for file in folder.iterdir()) < LARGEST


@pytest.mark.parametrize("name", shipped())
def test_each_attaches_to_its_base_and_generates(name: str, smollm2: Any) -> None:
    model, tokenizer = tiny_hybrid() if name.startswith("tiny-hybrid") else smollm2
    addon = AddOn.from_pretrained(name, dtype=model.dtype)
    ids = torch.arange(40, 200)[None]
    with attach(model, addon):
        made = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert made.shape == (1, 163)
    assert tokenizer.decode(made[0, 160:])


def test_a_name_that_is_nothing_tells_what_comes_with_kvfold() -> None:
    with pytest.raises(AddOnError, match="tiny-hybrid-card"):
        AddOn.from_pretrained("smollm3")


def test_files_of_a_saved_add_on_can_be_read_by_others(tmp_path: Path) -> None:
    AddOn.from_pretrained("tiny-hybrid-card").save_pretrained(tmp_path / "copy")
    for file in (tmp_path / "copy").iterdir():
        assert file.stat().st_mode & stat.S_IROTH
