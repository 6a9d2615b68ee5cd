"""A whole evaluation on tiny models."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kvfold.errors import EvaluationError
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.runner import PLAIN, evaluate
from kvfold.evaluation.speed import SpeedSettings
from kvfold.plan import Plan

IDENTITY = Plan.from_dict(
    {"anchors": 2, "window": 4, "depth": [{"method": "identity", "layers": [2, 3, 4, 5]}]}
)
CSA2 = Plan.from_dict(
    {"anchors": 2, "window": 4, "depth": [{"method": "csa2", "source": 3, "readers": [4, 5]}]}
)


def run(model, candidates, windows, **settings):
    return evaluate(model, candidates, windows, lengths=(64,), speed=False, **settings)


def test_the_plain_model_comes_first_and_agrees_with_itself(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    made = run(model, {"a": bare_addon(model, CSA2)}, windows)
    assert [result.name for result in made.results] == [PLAIN, "a"]
    quality = made.results[0].quality
    assert (quality.kl, quality.top_1_agreement, quality.top_5_agreement) == (0.0, 1.0, 1.0)
    assert made.results[0].plan is None


@pytest.mark.parametrize("history", ["folded", "exact"])
def test_identity_plan_scores_as_the_plain_model(tiny_model, windows, bare_addon, history):
    model = tiny_model("qwen3", dtype=torch.float64)
    made = run(model, {"same": bare_addon(model, IDENTITY)}, windows, history=history)
    plain, same = (result.quality for result in made.results)
    assert same.loss == pytest.approx(plain.loss, abs=1e-9)
    assert same.kl == pytest.approx(0.0, abs=1e-9)
    assert same.top_1_agreement == 1.0
    assert same.recovery == pytest.approx(1.0, abs=1e-6)


def test_the_dropped_run_is_made_beside_and_shared(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    told = []
    candidates = {"a": bare_addon(model, CSA2), "b": bare_addon(model, CSA2, scale=0.5)}
    made = run(model, candidates, windows, on_progress=told.append)
    assert told == [PLAIN, "a", "a, history dropped", "b"]
    _, a, b = (result.quality for result in made.results)
    assert a.dropped_perplexity == b.dropped_perplexity
    assert a.kl != b.kl


def test_results_do_not_depend_on_the_batch(tiny_model, windows, bare_addon):
    model = tiny_model("llama", dtype=torch.float64)
    addon = bare_addon(model, CSA2)
    one, six = (run(model, {"a": addon}, windows, batch=size) for size in (1, 6))
    assert one.results[1].quality.kl == pytest.approx(six.results[1].quality.kl, rel=1e-9)


def test_a_longer_kept_window_stays_closer_to_the_plain_model(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    addon = bare_addon(model, CSA2)
    candidates = {f"{w}": with_plan(addon, window=w, anchors=None) for w in (2, 16, 64)}
    made = run(model, candidates, windows)
    kl = [result.quality.kl for result in made.results[1:]]
    assert kl[0] > kl[1] > kl[2] == pytest.approx(0.0, abs=1e-6)
    assert [result.plan["window"] for result in made.results[1:]] == [2, 16, 64]


def test_no_recovery_is_given_where_nothing_is_forgotten(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    made = run(model, {"a": with_plan(bare_addon(model, CSA2), window=64)}, windows)
    assert made.results[1].quality.recovery is None


def test_a_figure_that_is_not_finite_is_an_error_that_names_the_candidate(
    tiny_model, windows, bare_addon
):
    model = tiny_model("llama")
    good, bad = bare_addon(model, CSA2), bare_addon(model, CSA2)
    with torch.no_grad():
        next(bad.pipelines.parameters()).fill_(math.nan)
    with pytest.raises(EvaluationError, match=r"'broken' gave loss=nan"):
        run(model, {"fine": good, "broken": bad}, windows)


def test_an_addon_of_another_model_is_refused_before_anything_runs(tiny_model, windows, bare_addon):
    model, told = tiny_model("llama"), []
    addon = bare_addon(model, CSA2)

    def refuse(_):
        raise ValueError("another model")

    addon.check_base = refuse
    with pytest.raises(ValueError, match="another model"):
        run(model, {"a": addon}, windows, on_progress=told.append)
    assert told == []


@pytest.mark.parametrize("shape", [(0, 40), (3, 1), (5,)])
def test_tokens_without_anything_to_score_are_refused(tiny_model, shape):
    with pytest.raises(EvaluationError, match="at least one window of two tokens"):
        run(tiny_model("llama"), {}, torch.zeros(shape, dtype=torch.int64))


def test_the_plain_models_name_is_taken(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    with pytest.raises(EvaluationError, match="belongs to the plain model"):
        run(model, {PLAIN: bare_addon(model, CSA2)}, windows)


def test_speed_is_measured_for_all(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    settings = SpeedSettings(history=30, decode_tokens=2, repeats=1)
    made = evaluate(
        model, {"a": bare_addon(model, CSA2)}, windows, lengths=(64,), speed_settings=settings
    )
    plain, folded = (result.speed for result in made.results)
    assert plain.cache_bytes is None
    assert folded.cache_bytes > 0
    assert min(plain.prefill_tokens_per_second, folded.decode_tokens_per_second) > 0


def test_an_evaluation_is_plain_data(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    made = run(model, {"a": bare_addon(model, CSA2)}, windows)
    data = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert data["results"][1]["plan"]["depth"][0]["method"] == "csa2"
    assert data["results"][1]["memory"][0]["times_smaller"] > 0
    assert sum(data["results"][1]["resident"].values()) == 3
    assert "6 non-overlapping windows of 40 tokens" in data["convention"]
