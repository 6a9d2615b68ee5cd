"""Speed is measured on real caches, interleaved, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch

from kvfold.evaluation import speed
from kvfold.evaluation.speed import SpeedSettings, measure_speed
from kvfold.plan import Plan
from kvfold.runtime.feeding import cache_argument

PLAN = Plan.from_dict(
    {"anchors": 2, "window": 4, "depth": [{"method": "csa2", "source": 3, "readers": [4, 5]}]}
)


def test_the_cache_argument_is_one_that_the_forward_has(tiny_model, windows):
    model = tiny_model("llama")
    output = model(windows[:1], use_cache=True, **{cache_argument(model): None})
    assert output[cache_argument(model)].get_seq_length() == windows.shape[1]


def test_repeats_are_interleaved_and_medians_taken(tiny_model, windows, monkeypatch):
    model, order = tiny_model("llama"), []
    runs = [
        (1.0, 1.0, None, 5, 1.5),
        (2.0, 1.0, 9, None, 2.5),
        (9.0, 5.0, None, 7, 9.5),
        (4.0, 1.0, 9, None, 4.5),
    ]
    times = iter([speed._Run(*run) for run in runs] * 2)

    def one_run(model, addon, ids, settings):
        order.append(addon)
        return next(times)

    monkeypatch.setattr(speed, "_one_run", one_run)
    settings = SpeedSettings(history=12, decode_tokens=6, repeats=3)
    made = measure_speed(model, {"plain": None, "folded": "addon"}, windows, settings)
    assert order == [None, "addon"] * 3
    assert made["plain"].prefill_tokens_per_second == pytest.approx(12 / 1.0)
    assert made["folded"].prefill_tokens_per_second == pytest.approx(12 / 2.0)
    assert (made["plain"].cache_bytes, made["folded"].cache_bytes) == (None, 9)
    assert (made["plain"].peak_bytes, made["folded"].peak_bytes) == (5, None)
    assert (made["plain"].first_token_seconds, made["folded"].first_token_seconds) == (1.5, 2.5)


def test_the_first_token_takes_at_least_its_prefill(tiny_model, windows):
    settings = SpeedSettings(history=20, decode_tokens=2, repeats=1)
    made = measure_speed(tiny_model("llama"), {"plain": None}, windows, settings)["plain"]
    assert made.first_token_seconds >= made.history / made.prefill_tokens_per_second


def test_few_tokens_are_repeated_to_fill_the_history(tiny_model, bare_addon):
    model = tiny_model("llama")
    settings = SpeedSettings(history=25, decode_tokens=3, repeats=1)
    made = measure_speed(model, {"a": bare_addon(model, PLAN)}, torch.tensor([[5, 6, 7]]), settings)
    assert made["a"].history == 25


def test_the_model_is_left_as_it_was(tiny_model, bare_addon, windows):
    model = tiny_model("llama")
    with torch.no_grad():
        before = model(windows).logits
    settings = SpeedSettings(history=20, decode_tokens=2, repeats=1)
    measure_speed(model, {"a": bare_addon(model, PLAN)}, windows, settings)
    with torch.no_grad():
        assert torch.equal(model(windows).logits, before)
