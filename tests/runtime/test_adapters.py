"""Low-rank terms on a model: the same as merged weights, differentiable, gone without a trace."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from kvfold.anatomy import anatomy, attention_module
from kvfold.errors import AttachError, PlanError, UnsupportedModelError
from kvfold.fitting.fit import fit
from kvfold.methods import Source, build_lora
from kvfold.plan import Plan
from kvfold.runtime.adapters import Adapters, adapted, check_projections
from kvfold.runtime.attach import attach
from kvfold.runtime.capture import capture
from kvfold.store.addon import AddOn

IDS = torch.arange(40).reshape(2, 20) % 90 + 3
MERGED = 1e-5
"""Logits of terms beside the weights against merged ones, in float64: the tiny hybrid's linear
attention computes in float32 whatever its dtype."""

GRADIENTS = 1e-4
"""Gradients (of up to 0.3) by either way; norms and softmax compute in float32."""


def plan_of(model, *targets):
    layers = anatomy(model).foldable_layers
    return Plan.from_dict(
        {
            "anchors": 2,
            "window": 64,
            "depth": [{"method": "identity", "layers": layers}],
            "lora": {"rank": 3, "targets": targets or ("q", "o")},
        }
    )


def random_lora(model, *targets, dtype=None):
    lora = build_lora(plan_of(model, *targets), anatomy(model))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in lora.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return lora.to(dtype or model.dtype)


def merged(model, lora):
    """A copy of the model with the terms in its weights."""
    made = deepcopy(model)
    for layer, name, term in lora.terms():
        module, start = anatomy(model).family.rows(attention_module(made, layer), name)
        with torch.no_grad():
            module.weight[start : start + len(term.b)] += term.scale * term.b @ term.a
    return made


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("targets", ["qo", "qkvo", "kv"])
def test_terms_act_as_if_merged_into_the_weights(tiny_model, family, targets):
    model = tiny_model(family, dtype=torch.float64)
    lora = random_lora(model, *targets)
    plain = logits(model)
    with adapted(model, lora):
        made = logits(model)
    assert (made - plain).abs().max() > 0.01
    torch.testing.assert_close(made, logits(merged(model, lora)), rtol=0, atol=MERGED)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("target", "qkv")
def test_a_target_changes_its_own_projection_only(tiny_model, family, target):
    model = tiny_model(family)
    lora, shape = random_lora(model, target), anatomy(model)
    attention = attention_module(model, shape.foldable_layers[0])
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = shape.family.project(attention, hidden)
        with adapted(model, lora):
            after = shape.family.project(attention, hidden)
    named = {"q": "queries", "k": "keys", "v": "values"}
    changed = {n: not torch.equal(getattr(before, n), getattr(after, n)) for n in named.values()}
    assert changed == {name: name == named[target] for name in named.values()}
    if before.gate is not None:
        assert torch.equal(before.gate, after.gate) == (target != "q")


def test_terms_pass_gradients_on_and_give_the_base_none(tiny_model):
    model = tiny_model("phi3", dtype=torch.float64).requires_grad_(False)
    lora = random_lora(model, "q", "k", "v", "o")
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    with adapted(model, lora):
        model(IDS, use_cache=False).logits.square().mean().backward()
    weights = list(lora.parameters())
    assert all(weight.grad is not None and weight.grad.any() for weight in weights)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())

    whole = merged(model, lora).requires_grad_()
    whole(IDS, use_cache=False).logits.square().mean().backward()
    for layer, name, term in lora.terms():
        module, start = anatomy(model).family.rows(attention_module(whole, layer), name)
        by_weight = term.scale * module.weight.grad[start : start + len(term.b)]
        for mine, expected in ((term.a, term.b.T @ by_weight), (term.b, by_weight @ term.a.T)):
            torch.testing.assert_close(mine.grad, expected, rtol=0, atol=GRADIENTS)


def test_terms_in_float32_leave_the_output_in_the_models_dtype(tiny_model):
    model = tiny_model("llama", dtype=torch.bfloat16)
    with adapted(model, random_lora(model, dtype=torch.float32)):
        assert logits(model).dtype == torch.bfloat16


def test_what_is_captured_inside_the_block_is_adapted(tiny_model):
    model = tiny_model("phi3", dtype=torch.float64)
    shape, lora = anatomy(model), random_lora(model, "k", "v")
    sources = [Source(kind, 3) for kind in ("keys", "values")]
    with adapted(model, lora):
        found = capture(model, shape, sources, IDS)
    expected = capture(merged(model, lora), shape, sources, IDS)
    for source in sources:
        torch.testing.assert_close(found[source], expected[source])


def test_no_terms_change_nothing(tiny_model):
    model = tiny_model("llama")
    with adapted(model, None):
        assert hooks(model) == 0


def test_the_model_is_given_back_also_after_an_exception(tiny_model):
    model = tiny_model("llama")
    plain, lora = logits(model), random_lora(model)
    with adapted(model, lora):
        assert hooks(model) == 12
    with pytest.raises(RuntimeError, match="inside"), adapted(model, lora):
        raise RuntimeError("inside")
    assert hooks(model) == 0
    adapters = Adapters(model, lora)
    adapters.detach()
    adapters.detach()
    assert hooks(model) == 0 and torch.equal(logits(model), plain)


def test_terms_act_once(tiny_model):
    model = tiny_model("llama")
    lora, addon = random_lora(model), AddOn.untrained(model, plan_of(model))
    message = "low-rank terms act on projection q of layer 0 already"
    with adapted(model, lora):
        for work in (
            lambda: Adapters(model, lora),
            lambda: attach(model, addon),
            lambda: fit(model, plan_of(model), IDS, progress=False),
        ):
            with pytest.raises(AttachError, match=message):
                work()
        assert hooks(model) == 12
    with attach(model, addon), pytest.raises(AttachError, match=message):
        Adapters(model, lora)


def test_projections_that_the_configuration_does_not_tell_are_refused(tiny_model):
    model = tiny_model("llama")
    lora = random_lora(model)
    model.model.layers[4].self_attn.o_proj = nn.Linear(48, 32)
    with pytest.raises(UnsupportedModelError, match=r"projection o of layer 4 .* 64 .* 48 inputs"):
        check_projections(model, lora)
    model.model.layers[4].self_attn.o_proj = nn.Identity()
    with (
        pytest.raises(UnsupportedModelError, match="got Identity with None inputs"),
        adapted(model, lora),
    ):
        pass
    assert hooks(model) == 0


def test_an_add_ons_terms_are_checked_and_are_the_plans_own(tiny_model):
    model = tiny_model("llama")
    addon = AddOn.untrained(model, plan_of(model))
    other = addon.plan.replace(lora={"rank": 4})
    for plan in (other, addon.plan.replace(lora=None)):
        with pytest.raises(PlanError, match=r"the add-on's own lora.*LoraEntry\(rank=3"):
            attach(model, addon, plan=plan)
    addon.lora.to(torch.float64)
    with pytest.raises(AttachError, match="one dtype and device"):
        attach(model, addon)
    assert hooks(model) == 0
