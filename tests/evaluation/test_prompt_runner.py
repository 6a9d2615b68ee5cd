"""Candidates measured by what follows a prompt."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kvfold import attach
from kvfold.errors import EvaluationError
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.continuation import continuation_loss
from kvfold.evaluation.prompt_runner import PromptEvaluation, PromptResult, evaluate_prompts
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.speed import Speed
from kvfold.plan import Plan

SKIP = Plan.from_dict(
    {
        "anchors": 2,
        "window": 4,
        "depth": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}],
        "prefill": "skip",
        "replay": 6,
    }
)


def run(model, candidates, windows, continuation=10, **settings):
    settings = {"lengths": (64,), "speed": False, **settings}
    return evaluate_prompts(model, candidates, windows, continuation, **settings)


def test_losses_are_those_of_the_continuation_with_the_addon_attached(
    tiny_model, windows, bare_addon
):
    model = tiny_model("llama")
    addon = bare_addon(model, SKIP)
    told = []
    made = run(model, {"a": addon}, windows, on_progress=told.append)
    plain, skipping = made.results
    base = continuation_loss(model, windows, 30)
    with attach(model, addon):
        losses = continuation_loss(model, windows, 30, chunk=6)
    assert told == [plain.name, "a"] == [PLAIN, "a"]
    assert plain.losses == pytest.approx(base.tolist())
    assert skipping.losses == pytest.approx(losses.tolist())
    assert skipping.loss_rise == pytest.approx(float((losses - base).mean()))
    assert skipping.perplexity / plain.perplexity - 1 == pytest.approx(skipping.perplexity_rise)
    assert (made.windows, made.prompt, made.continuation) == (6, 30, 10)


def test_skipping_costs_fewer_operations_than_not_skipping(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    addon = bare_addon(model, SKIP)
    made = run(model, {"skip": addon, "full": with_plan(addon, prefill="full")}, windows)
    plain, skip, full = made.results
    assert skip.operations_left == pytest.approx(0.5 + 0.5 * 6 / 30)
    assert skip.skipped_tokens == 30 - 6 - 2
    assert full.operations_left == plain.operations_left == 1.0
    assert full.skipped_tokens == plain.skipped_tokens == 0
    assert skip.losses != full.losses
    assert sum(skip.resident.values()) == 3
    assert skip.memory[0].stored_bytes == full.memory[0].stored_bytes


def test_a_prompt_no_longer_than_the_replay_is_read_as_without_skipping(
    tiny_model, windows, bare_addon
):
    model = tiny_model("llama")
    addon = with_plan(bare_addon(model, SKIP), replay=30)
    made = run(model, {"skip": addon, "full": with_plan(addon, prefill="full")}, windows)
    assert made.results[1].losses == made.results[2].losses
    assert made.results[1].operations_left == 1.0


def test_prefill_is_timed_at_the_prompts_length(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    made = run(model, {"a": bare_addon(model, SKIP)}, windows, speed=True, repeats=1)
    plain, skipping = made.results
    assert plain.speed.history == skipping.speed.history == 30
    assert made.times_faster(plain) == 1.0
    assert made.times_faster(skipping) == plain.prefill_seconds / skipping.prefill_seconds > 0


def test_figures_that_follow_from_others_are_in_the_plain_data(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    made = run(model, {"a": bare_addon(model, SKIP)}, windows)
    result = json.loads(json.dumps(made.to_dict(), allow_nan=False))["results"][1]
    assert result["plan"]["replay"] == 6
    assert result["perplexity_rise"] == made.results[1].perplexity_rise
    assert result["memory"][0]["times_smaller"] > 0
    assert result["prefill_seconds"] is result["times_faster"] is None


def test_the_rise_of_perplexity_has_the_error_of_the_losses_to_first_order():
    result = PromptResult("a", {}, 1.0, math.e, (1.0,), (), loss_rise=0.1, loss_rise_error=0.02)
    assert result.perplexity_rise == pytest.approx(math.exp(0.1) - 1)
    assert result.perplexity_rise_error == pytest.approx(0.02 * math.exp(0.1))
    assert PromptResult("a", {}, 1.0, math.e, (1.0,), ()).perplexity_rise_error is None


def test_seconds_are_the_prompts_tokens_over_their_rate():
    plain, fast = (
        PromptResult("a", {}, 1.0, math.e, (1.0,), (), speed=Speed(100, rate, 1.0, None))
        for rate in (50.0, 200.0)
    )
    assert (plain.prefill_seconds, fast.prefill_seconds) == (2.0, 0.5)
    assert PromptEvaluation((plain, fast), 1, 100, 1, "float32").times_faster(fast) == 4.0


@pytest.mark.parametrize("continuation", [0, 40, 41])
def test_prompt_and_continuation_need_a_token_each(tiny_model, windows, continuation):
    with pytest.raises(EvaluationError, match=f"with a continuation of {continuation};"):
        run(tiny_model("llama"), {}, windows, continuation)


def test_the_plain_models_name_is_taken(tiny_model, windows, bare_addon):
    model = tiny_model("llama")
    with pytest.raises(EvaluationError, match="belongs to the plain model"):
        run(model, {PLAIN: bare_addon(model, SKIP)}, windows)


def test_an_addon_of_another_model_is_refused_before_anything_runs(tiny_model, windows, bare_addon):
    model, told = tiny_model("llama"), []
    addon = bare_addon(model, SKIP)

    def refuse(_):
        raise ValueError("another model")

    addon.check_base = refuse
    with pytest.raises(ValueError, match="another model"):
        run(model, {"a": addon}, windows, on_progress=told.append)
    assert told == []


def test_a_single_window_has_no_error(tiny_model, windows, bare_addon):
    model = tiny_model("llama", dtype=torch.float64)
    made = run(model, {"a": bare_addon(model, SKIP)}, windows[:1])
    assert made.results[1].loss_rise_error is None
