"""Rows in which nothing is folded are told before any work."""

from __future__ import annotations

import pytest

from kvfold.anatomy import anatomy
from kvfold.errors import CorpusError
from kvfold.fitting.predict import predict
from kvfold.fitting.recipe_checks import check_recipe, check_stages
from kvfold.fitting.row_lengths import check_plan_window, check_windows, least_seq
from kvfold.plan import Plan
from kvfold.runtime.schedule import Schedule

from .tiny_recipes import PLAN, made_recipe

PLANS = (
    {"anchors": 2, "depth": [{"method": "ced", "split": 1, "layers": [1]}]},
    {"anchors": 0, "sequence": [{"method": "pool", "layers": [0], "group": 4}]},
)


@pytest.mark.parametrize("keys", PLANS)
@pytest.mark.parametrize("window", [0, 7])
def test_the_shortest_row_is_the_first_with_a_slot(keys, window):
    plan = Plan.from_dict({**keys, "window": window})
    schedule = Schedule(plan.anchors, window, plan.group_of(plan.folded_layers[0]))
    least = least_seq(plan, window)
    assert [schedule.slots(least - 1), schedule.slots(least)] == [0, 1]
    check_windows(plan, [window], least, "the stage")
    check_plan_window(plan, least + 1)
    with pytest.raises(CorpusError, match=f"at least {least} tokens"):
        check_windows(plan, [0, window], least - 1, "the stage")
    with pytest.raises(CorpusError, match=f"at least {least + 1} tokens"):
        check_plan_window(plan, least)


def test_a_plan_that_folds_nothing_needs_no_history():
    check_plan_window(Plan.from_dict({"window": 100}), 2)


@pytest.mark.parametrize("stage", ["gates", "refine", "distil"])
def test_a_window_as_long_as_the_rows_is_refused_before_any_work(tiny_model, tmp_path, stage):
    shape = anatomy(tiny_model("llama"))
    chosen = made_recipe(stages=["closed-form", {"stage": stage, "windows": [8, 48, 64]}])
    with pytest.raises(CorpusError, match=rf"the stage {stage}.* windows of 48, 64 leave none"):
        check_recipe(chosen, shape, tmp_path)
    with pytest.raises(CorpusError, match="leave none"):
        predict(chosen, tiny_model("llama").config, "cpu", tiny_model("llama").dtype)
    check_recipe(made_recipe(stages=[{"stage": stage, "windows": [8, 44]}]), shape, tmp_path)


def test_a_plans_own_window_must_leave_something_to_measure(tiny_model):
    shape = anatomy(tiny_model("llama"))
    with pytest.raises(CorpusError, match="nothing is folded and nothing can be measured"):
        check_stages(made_recipe(plan={**PLAN, "window": 64}, stages=["closed-form"]), shape)
