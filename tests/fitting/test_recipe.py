"""Recipes are data: what can't be is refused, by the key at fault, and what is survives a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvfold.anatomy import anatomy
from kvfold.errors import PlanError, RecipeError
from kvfold.fitting.closed_form import ClosedFormSettings
from kvfold.fitting.gates import GateSettings
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.training_text import TextPart
from kvfold.presets import preset

YAML = """\
name: an-example
model: default
plan: {preset: csa2, anchors: 0, window: 0}
text:
  - {source: "${DATA}/prose/valid.txt", weight: 3, tokens: 20000}
  - {source: self, tokens: 10000}
seq: 256
held_out: 0.1
seed: 7
self_text: {temperature: 0.9, prompts: [Once, Then]}
stages:
  - stage: closed-form
    ridge: 1e-4
    tokens: 8192
  - {stage: gates, steps: 5, windows: [32, 64]}
"""


def recipe(**keys):
    return Recipe.from_dict({"name": "a", "plan": "pool", "stages": ["closed-form"], **keys})


def test_a_recipe_is_read_from_yaml_with_the_settings_of_each_stage():
    made = Recipe.from_yaml(YAML)
    assert made.text == (
        TextPart("${DATA}/prose/valid.txt", 3, 20000),
        TextPart("self", tokens=10000),
    )
    assert [entry.name for entry in made.stages] == ["closed-form", "gates"]
    assert made.stages[0].settings == ClosedFormSettings(ridge=1e-4, tokens=8192)
    assert made.stages[1].settings == GateSettings(steps=5, windows=(32, 64))
    assert made.self_text.prompts == ("Once", "Then")
    assert made.held_out_tokens == 3000


@pytest.mark.parametrize("form", ["to_yaml", "to_json"])
def test_a_recipe_survives_being_written_and_read(form):
    made = Recipe.from_yaml(YAML)
    again = Recipe.from_yaml(getattr(made, form)())
    assert again == made
    assert again.to_dict() == made.to_dict()
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()


def test_a_short_recipe_has_the_defaults():
    made = recipe()
    assert made.text == (TextPart(),)
    assert (made.model_name, made.seq, made.held_out_tokens) == ("smollm2-135m", 512, 8192)
    assert recipe(model="tiny-hybrid").model_name == "tiny-hybrid"
    with pytest.raises(ValueError, match="frozen"):
        made.seq = 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"nmae": "b"}, "unknown key nmae"),
        ({"name": ""}, "name: "),
        ({"version": 2}, "version: "),
        ({"dtype": "int8"}, "dtype: "),
        ({"seq": 1}, "seq: "),
        ({"held_out": 100}, "held_out must be at least a row of 512 tokens; it comes to 100"),
        ({"held_out": 1000.5}, "a whole number of tokens"),
        ({"held_out": 0}, "held_out: "),
        ({"held_out": 0.5}, "held_out as a share needs `tokens` of every text"),
        ({"plan": "nonsense"}, "plan: a preset is one of balanced"),
        ({"plan": {"preset": "csa2", "widnow": 3}}, "unknown key widnow"),
        ({"plan": {"preset": "csa2", "window": -3}}, "window: "),
        ({"plan": {"depth": [{"method": "ced"}]}}, "depth.0.ced.split"),
        ({"plan": 3}, "plan"),
        ({"text": "file.txt"}, "text must be a list"),
        ({"text": ["file.txt"]}, "a text must be a mapping"),
        ({"text": [{"sorce": "a"}]}, "unknown key sorce; it knows source, weight, tokens"),
        ({"text": [{"weight": 0}]}, "weight must be above 0"),
        ({"text": [{"source": "self"}]}, "has no end"),
        ({"text": [{"source": "hub:../../x"}]}, "by its path alone, without hub:"),
        ({"text": [{"tokens": "many"}]}, "tokens: "),
        ({"text": [{"source": "${HOME}/a"}]}, "may begin with ${DATA}/"),
        ({"text": [{"source": "a/${DATA}"}]}, "may begin with ${DATA}/"),
        ({"text": [{"source": "${DATA}x"}]}, "may begin with ${DATA}/"),
        ({"stages": []}, "stages: "),
        ({"stages": ["bake"]}, "a stage is one of closed-form, gates"),
        ({"stages": [{"ridge": 1}]}, "a mapping with the key stage"),
        ({"stages": [{"stage": "gates", "stepz": 1}]}, "the stage gates has the unknown key stepz"),
        (
            {"stages": [{"stage": "gates", "steps": -1}]},
            "stages: stage gates: steps of a training must be",
        ),
        ({"stages": [{"stage": "gates", "steps": "x"}]}, "the stage gates is not valid: steps: "),
        ({"stages": [{"stage": "distil", "parts": ["soul"]}]}, "parts.0: "),
        ({"stages": [{"stage": "refine", "rows": 0}]}, "stage refine: rows must be at least 1"),
        ({"stages": [{"stage": "closed-form", "ridge": -1}]}, "ridge must be at least 0"),
        ({"stages": [{"stage": "closed-form", "tokens": 0}]}, "tokens must be at least 1"),
        ({"self_text": {"batch": 0}}, "self_text.batch"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(keys, words):
    with pytest.raises(RecipeError) as caught:
        recipe(**keys)
    assert words in str(caught.value)
    assert "Value error" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a list", "just words", "{broken: [", ""])
def test_a_file_that_is_no_recipe_is_refused_with_its_path(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        Recipe.from_file(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.yaml"):
        Recipe.from_file(tmp_path / "none.yaml")


def test_keys_beside_a_preset_replace_its_own(tiny_config):
    shape = anatomy(tiny_config("llama"))
    made = recipe(plan={"preset": "csa2", "anchors": 0, "window": 7}).plan_for(shape)
    assert made == preset("csa2", shape).replace(anchors=0, window=7)
    assert recipe(plan="csa2").plan_for(shape) == preset("csa2", shape)


def test_a_whole_plan_is_taken_as_it_is_and_checked_against_the_model(tiny_config):
    shape = anatomy(tiny_config("llama"))
    plan = {"depth": [{"method": "ced", "split": 2, "layers": [4]}], "window": 9}
    assert recipe(plan=plan).plan_for(shape).window == 9
    plan["depth"][0]["layers"] = [40]
    with pytest.raises(PlanError, match="layer 40"):
        recipe(plan=plan).plan_for(shape)


def test_the_data_folder_is_put_in_place_and_asked_for():
    made = Recipe.from_yaml(YAML)
    placed = made.text_in(Path("/somewhere"))
    assert [part.source for part in placed] == ["/somewhere/prose/valid.txt", "self"]
    with pytest.raises(RecipeError, match="--data FOLDER"):
        made.text_in(None)
    assert recipe().text_in(None) == (TextPart(),)


def test_a_recipe_is_written_in_the_order_of_its_keys_and_counts_stay_whole():
    made = Recipe.from_yaml(YAML).to_dict()
    assert list(made) == list(Recipe.model_fields)
    assert repr(recipe(held_out=1024).to_dict()["held_out"]) == "1024"


def test_the_yaml_of_a_recipe_never_names_python_objects():
    assert "!!" not in Recipe.from_yaml(YAML).to_yaml()
    assert yaml.safe_load(Recipe.from_yaml(YAML).to_yaml())["stages"][1]["windows"] == [32, 64]
