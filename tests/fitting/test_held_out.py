"""Held-out quality: measured with the add-on attached, chunk by chunk, and the model left alone."""

from __future__ import annotations

import pytest
import torch

from kvfold.errors import CorpusError
from kvfold.fitting.fit import fit
from kvfold.fitting.held_out import HeldOut
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.store.addon import AddOn


def windows(count=4, seq=40, seed=0):
    return torch.randint(3, 97, (count, seq), generator=torch.Generator().manual_seed(seed))


def plan(**keys):
    depth = [{"method": "ced", "split": 1, "layers": [3, 4]}]
    return Plan.from_dict({"anchors": 2, "window": 4, "depth": depth, **keys})


def test_kl_is_that_of_whole_logits_with_the_addon_attached(tiny_model):
    model = tiny_model("llama")
    tokens = windows()
    addon = fit(model, plan(), windows(20, 32, 1), progress=False)
    measured = HeldOut(model, tokens).measure("it", addon)
    with torch.no_grad():
        base = model(tokens).logits.log_softmax(-1)
        with attach(model, addon):
            folded = model(tokens).logits.log_softmax(-1)
    kl = (base.exp() * (base - folded)).sum(-1)[:, :-1].mean()
    assert measured.kl == pytest.approx(float(kl), rel=1e-4)


def test_an_exact_plan_costs_nothing_and_a_dropped_history_something(tiny_model):
    model = tiny_model("llama")
    held_out = HeldOut(model, windows())
    exact = AddOn.untrained(model, plan(depth=[{"method": "identity", "layers": [3, 4]}]))
    assert held_out.base.kl == 0
    assert held_out.measure("it", exact).kl == pytest.approx(0, abs=1e-6)
    assert held_out.dropped(exact).kl > 1e-3


def test_exact_prompts_are_measured_on_an_exact_history(tiny_model):
    model = tiny_model("llama")
    code = [{"method": "latent", "layers": [1, 2, 3, 4], "rank": 16}]
    exact, folded = (plan(depth=code, prefill_attention=way) for way in ("exact", "folded"))
    made = fit(model, exact, windows(20, 32, 1), progress=False)
    other = AddOn(folded, made.pipelines, made.base, {})
    held_out = HeldOut(model, windows())
    assert held_out.measure("exact", made).kl != held_out.measure("folded", other).kl


def test_the_model_is_left_as_it_was(tiny_model):
    model = tiny_model("llama").train()
    addon = AddOn.untrained(model, plan())
    HeldOut(model, windows()).measure("it", addon)
    assert model.training
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (8,)])
def test_text_without_a_token_to_predict_is_refused(tiny_model, shape):
    with pytest.raises(CorpusError, match="at least one window of 2 tokens"):
        HeldOut(tiny_model("llama"), torch.zeros(shape, dtype=torch.int64))
