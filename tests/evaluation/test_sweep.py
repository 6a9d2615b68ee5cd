"""Settings of a sweep, the plans they need, and the one that is picked."""

from __future__ import annotations

import pytest

from kvfold.anatomy import anatomy
from kvfold.errors import PlanError
from kvfold.evaluation.prompt_runner import PromptEvaluation, PromptResult, evaluate_prompts
from kvfold.evaluation.speed import Speed
from kvfold.evaluation.sweep import (
    Setting,
    cheapest,
    closest,
    default_splits,
    depth_plan,
    sweep_candidates,
    sweep_plans,
    sweep_points,
    sweep_settings,
)


@pytest.fixture
def shape_of(tiny_config):
    return lambda family, **keys: anatomy(tiny_config(family, **keys))


def test_splits_are_tried_at_a_third_a_half_and_two_thirds(shape_of):
    assert default_splits(shape_of("llama")) == (2, 3, 4)
    assert default_splits(shape_of("llama", num_hidden_layers=30)) == (10, 15, 20)
    assert default_splits(shape_of("qwen3_5")) == (3, 7)


def test_splits_leave_no_sliding_layer_above_them(shape_of):
    assert default_splits(shape_of("gemma3")) == (4,)
    sliding = ["full_attention"] * 5 + ["sliding_attention"]
    with pytest.raises(PlanError, match="sliding window"):
        default_splits(shape_of("gemma3", layer_types=sliding))


def test_a_model_of_one_layer_has_no_split(shape_of):
    with pytest.raises(PlanError, match="take a deeper model"):
        default_splits(shape_of("llama", num_hidden_layers=1))


def test_every_upper_layer_is_regenerated_whatever_the_method(shape_of):
    shape = shape_of("llama", num_hidden_layers=12)
    ced = depth_plan(shape, "ced", 4, window=9, prefill="skip")
    assert [entry.layers for entry in ced.depth] == [tuple(range(4, 12))]
    csa2 = depth_plan(shape, "csa2", 4, window=9, prefill="skip")
    assert csa2.depth[0].layers == (4, 9)
    assert [entry.layers for entry in csa2.depth[1:]] == [(4, 5, 6, 7, 8), (9, 10, 11)]
    for plan in (ced, csa2):
        plan.check(shape)
        assert (plan.split, plan.window) == (4, 9)


def test_a_split_above_all_attention_layers_is_refused(shape_of):
    with pytest.raises(PlanError, match="none from layer 6 on"):
        depth_plan(shape_of("llama"), "ced", 6)


def test_each_split_is_read_without_skipping_and_with_every_replay(shape_of):
    made = sweep_settings(shape_of("llama"), (2, 3), (8, 16), None)
    assert made == [Setting(s, t) for s in (2, 3) for t in (None, 8, 16)]
    assert len({setting.name for setting in made}) == 6


@pytest.mark.parametrize(
    ("states", "ways"),
    [(None, [False, True]), ("both", [False, True]), ("on", [True]), ("off", [False])],
)
def test_hybrids_are_read_with_states_projected_or_not(shape_of, states, ways):
    made = sweep_settings(shape_of("qwen3_5"), (4,), (8,), states)
    assert made == [Setting(4, None), *(Setting(4, 8, way) for way in ways)]
    assert len({setting.name for setting in made}) == 1 + len(ways)


def test_states_are_only_tried_where_there_are_some(shape_of):
    assert sweep_settings(shape_of("qwen3_5"), (7,), (8,), None) == [
        Setting(7, None),
        Setting(7, 8),
    ]
    asked = sweep_settings(shape_of("llama"), (3,), (8,), "both")
    with pytest.raises(PlanError, match="state_projector serves linear-attention layers"):
        sweep_plans(shape_of("llama"), "ced", asked, window=8)


def test_one_plan_a_split_is_fitted_for_all_its_settings(shape_of):
    shape = shape_of("qwen3_5")
    plans = sweep_plans(shape, "ced", sweep_settings(shape, (3, 4), (8, 16), None), window=8)
    assert list(plans) == [3, 4]
    for split, plan in plans.items():
        assert (plan.split, plan.replay, plan.prefill) == (split, 16, "skip")
        assert plan.state_projector
    off = sweep_plans(shape, "ced", sweep_settings(shape, (4,), (8,), "off"), window=8)
    assert not off[4].state_projector


def test_a_replay_shorter_than_the_window_is_refused(shape_of):
    shape = shape_of("llama")
    settings = sweep_settings(shape, (3,), (8, 16), None)
    with pytest.raises(PlanError, match="replay must be at least the window's 9"):
        sweep_plans(shape, "ced", settings, window=9)


def test_candidates_share_the_weights_of_their_split(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    shape = anatomy(model)
    settings = sweep_settings(shape, (2, 3), (6, 12), None)
    plans = sweep_plans(shape, "csa2", settings, window=4)
    addons = {split: bare_addon(model, plan) for split, plan in plans.items()}
    candidates = sweep_candidates(addons, settings)
    assert list(candidates) == [setting.name for setting in settings]
    for setting in settings:
        assert candidates[setting.name].pipelines is addons[setting.split].pipelines
    made = evaluate_prompts(model, candidates, windows, 10, lengths=(), speed=False)
    assert [result.operations_left for result in made.results[1:4]] == pytest.approx(
        [1.0, 1 / 3 + 2 / 3 * 6 / 30, 1 / 3 + 2 / 3 * 12 / 30]
    )
    points = sweep_points(made, settings)
    assert [p.label for p in points] == ["split 2: 6", "12", "split 3: 6", "12"]
    assert [p.perplexity for p in points[:2]] == [r.perplexity for r in made.results[2:4]]


def evaluation(*results):
    plain = PromptResult("plain", None, 1.0, 2.7, (1.0,), ())
    return PromptEvaluation((plain, *results), 1, 100, 10, "float32")


def result(name, left, rise, *, seconds=None, skipped=50):
    speed = None if seconds is None else Speed(100, 100 / seconds, 1.0, None)
    return PromptResult(
        name, {}, 1.0 + rise, 2.7 * (1 + rise), (1.0,), (), rise, None, skipped, left, speed=speed
    )


def test_the_fewest_operations_within_the_tolerance_are_picked():
    made = evaluation(
        result("nothing skipped", 1.0, 0.001, skipped=0),
        result("dear", 0.8, 0.01),
        result("good", 0.6, 0.029),
        result("bad", 0.4, 0.04),
    )
    assert cheapest(made).name == "good"
    assert cheapest(made, 0.05).name == "bad"
    assert cheapest(made, 0.005) is None
    assert closest(made).name == "dear"


def test_of_equal_operations_the_faster_is_picked():
    slow, fast = result("slow", 0.5, 0.01, seconds=2.0), result("fast", 0.5, 0.02, seconds=1.0)
    assert cheapest(evaluation(slow, fast)).name == "fast"
    assert cheapest(evaluation(result("a", 0.5, 0.02), result("b", 0.5, 0.01))).name == "b"


def test_nothing_is_picked_where_nothing_was_skipped():
    made = evaluation(result("full", 1.0, 0.0, skipped=0))
    assert cheapest(made) is None
    assert closest(made) is None
