"""What can't run on a model that is spread over processes is told before the model is loaded."""

from __future__ import annotations

import pytest

from kvfold.errors import FitError
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.shard_checks import check_sharded
from kvfold.fitting.shared_steps import require_even_looks
from kvfold.fitting.workers import ALONE, Workers
from kvfold.plan import Plan
from kvfold.runtime.sharding import gathered, is_sharded, whole

RECIPE = {
    "name": "spread",
    "model": "tiny-hybrid",
    "plan": {"preset": "ced-csa2"},
    "text": [{"source": "a.txt"}],
    "seq": 64,
    "held_out": 128,
    "stages": [{"stage": "closed-form"}],
}
PLAN = Plan.from_dict({"window": 4, "depth": [{"method": "ced", "split": 1, "layers": [1]}]})
TWO = Workers(0, 2)


def test_a_recipe_of_text_from_files_may_be_spread_over_two():
    check_sharded(Recipe.from_dict(RECIPE), PLAN, TWO)


def test_one_process_alone_is_told_how_to_start_more():
    with pytest.raises(FitError, match="torchrun"):
        check_sharded(Recipe.from_dict(RECIPE), PLAN, ALONE)


def test_text_of_the_models_own_is_refused():
    recipe = Recipe.from_dict({**RECIPE, "text": [{"source": "self", "tokens": 640}]})
    with pytest.raises(FitError, match="at its own pace"):
        check_sharded(recipe, PLAN, TWO)


def test_a_state_projector_is_refused():
    plan = Plan.from_dict(
        {
            "window": 4,
            "prefill": "skip",
            "state_projector": True,
            "depth": [{"method": "ced", "split": 6, "layers": [7, 11]}],
        }
    )
    with pytest.raises(FitError, match="state projector"):
        check_sharded(Recipe.from_dict(RECIPE), plan, TWO)


def test_a_whole_model_is_as_it_was(tiny_model):
    model = tiny_model("llama")
    weight = model.get_decoder().layers[0].mlp.up_proj.weight
    assert not is_sharded(model)
    assert gathered(weight) is weight
    with whole(model, 0):
        assert model.get_decoder().layers[0].mlp.up_proj.weight is weight
    require_even_looks(TWO, model, 3)
