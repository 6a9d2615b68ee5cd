"""Low-rank terms on plain tensors, and built for a model."""

from __future__ import annotations

import pytest
import torch

from kvfold.anatomy import anatomy, attention_module
from kvfold.errors import PlanError
from kvfold.methods import build_lora
from kvfold.methods.lora import Lora, LowRank
from kvfold.plan import Plan

WIDTHS = {(2, "q"): (32, 64), (2, "o"): (64, 32), (5, "q"): (32, 64)}


def random(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def filled(term):
    with torch.no_grad():
        term.b.copy_(random(*term.b.shape, seed=3))
    return term


def test_a_term_is_scale_times_b_times_a_times_x():
    term = filled(Lora(WIDTHS, 3, 0.5).term(2, "o"))
    x = random(2, 7, 64)
    expected = 0.5 * torch.einsum("or,ri,bsi->bso", term.b, term.a, x)
    torch.testing.assert_close(term(x), expected)


def test_terms_start_as_nothing_but_ready_to_learn():
    made = Lora(WIDTHS, 3, 1.0)
    for _, _, term in made.terms():
        assert not term.b.any() and term.a.all()
        assert term.a.abs().max() <= term.a.shape[1] ** -0.5
        assert term.a.std() > 0.4 * term.a.shape[1] ** -0.5
        assert not term(random(4, term.a.shape[1])).any()


def test_each_start_is_its_own_and_the_same_every_time():
    first, second = Lora(WIDTHS, 3, 1.0), Lora(WIDTHS, 3, 1.0)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    assert not torch.equal(first.term(2, "q").a, first.term(5, "q").a)


def test_terms_are_named_by_layer_and_projection_and_come_in_order():
    made = Lora(WIDTHS, 3, 1.0)
    names = {f"layers.{layer}.{name}.{matrix}" for layer, name in WIDTHS for matrix in "ab"}
    assert set(made.state_dict()) == names
    assert [(layer, name) for layer, name, _ in made.terms()] == list(WIDTHS)


def test_a_term_computes_in_the_dtype_of_its_weights():
    term = filled(LowRank(8, 6, 2, 1.0))
    assert term(random(3, 8).to(torch.bfloat16)).dtype == torch.float32


def test_gradients_are_those_of_finite_differences():
    term = LowRank(5, 4, 2, 0.5).double()
    x, a, b = (
        random(*shape, seed=seed, dtype=torch.float64).requires_grad_()
        for seed, shape in enumerate([(3, 5), (2, 5), (4, 2)])
    )

    def added(x, a, b):
        return torch.func.functional_call(term, {"a": a, "b": b}, (x,))

    assert torch.autograd.gradcheck(added, (x, a, b))


def test_a_plans_terms_have_the_widths_of_the_models_projections(tiny_model, family):
    model = tiny_model(family)
    shape = anatomy(model)
    lora = {"rank": 3, "alpha": 6, "targets": ["q", "k", "v", "o"]}
    layers = shape.foldable_layers
    plan = Plan.from_dict({"depth": [{"method": "identity", "layers": layers}], "lora": lora})
    made = build_lora(plan, shape)
    assert (made.rank, made.scale) == (3, 2.0)
    assert made.adapted == tuple((n, name) for n in layers for name in "qkvo")
    columns = dict.fromkeys(layers, 0)
    for layer, name, term in made.terms():
        module, start = shape.family.rows(attention_module(model, layer), name)
        assert term.a.shape == (3, module.in_features)
        assert start + term.b.shape[0] <= module.out_features
        columns[layer] += term.b.shape[0]
    for layer in layers:
        attention = attention_module(model, layer)
        modules = {shape.family.rows(attention, name)[0] for name in "qkvo"}
        assert columns[layer] == sum(module.out_features for module in modules)


def test_a_plan_without_lora_has_no_terms_and_one_for_another_model_is_refused(tiny_config):
    shape = anatomy(tiny_config("llama"))
    assert build_lora(Plan(), shape) is None
    with pytest.raises(PlanError, match="lora names layer 9"):
        build_lora(Plan.from_dict({"lora": {"rank": 1, "layers": [9]}}), shape)
