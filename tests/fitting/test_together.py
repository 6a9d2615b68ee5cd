"""Plans fitted together are what each would be alone."""

from __future__ import annotations

import pytest
import torch

from kvfold.errors import CorpusError
from kvfold.fitting.fit import fit
from kvfold.fitting.together import fit_together
from kvfold.plan import Plan

DEPTHS = {
    "ced": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}],
    "csa2": [{"method": "csa2", "source": 3, "readers": [4, 5]}],
    "fed": [
        {"method": "ced", "split": 3, "layers": [3]},
        {"method": "csa2", "source": 3, "readers": [4, 5]},
    ],
    "latent 8": [{"method": "latent", "layers": [3, 4, 5], "rank": 8}],
    "latent 24": [{"method": "latent", "layers": [3, 4, 5], "rank": 24}],
    "latent of H": [{"method": "latent", "layers": [3, 4, 5], "rank": 8, "split": 3}],
    "identity": [{"method": "identity", "layers": [0, 1]}],
}


def plans(anchors):
    return {
        name: Plan.from_dict({"anchors": anchors, "window": 8, "depth": depth})
        for name, depth in DEPTHS.items()
    }


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 97, (20, 32), generator=generator)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_together_equals_alone(tiny_model, tokens, family):
    model = tiny_model(family, dtype=torch.float64)
    together = fit_together(model, plans(2), tokens, progress=False)
    for name, plan in plans(2).items():
        alone = fit(model, plan, tokens, progress=False)
        mine = together[name].pipelines.state_dict()
        for key, expected in alone.pipelines.state_dict().items():
            torch.testing.assert_close(
                mine[key], expected, rtol=1e-6, atol=1e-8, msg=f"{name} {key}"
            )


def test_plans_of_other_anchors_do_not_share_sums(tiny_model, tokens):
    model = tiny_model("llama", dtype=torch.float64)
    plan = {"depth": DEPTHS["latent 8"], "window": 8}
    two = {f"{a}": Plan.from_dict({**plan, "anchors": a}) for a in (0, 4)}
    together = fit_together(model, two, tokens, progress=False)
    for name, chosen in two.items():
        alone = fit(model, chosen, tokens, progress=False)
        mine = together[name].pipelines[0].depth.encoder.weight
        torch.testing.assert_close(
            mine, alone.pipelines[0].depth.encoder.weight, rtol=1e-6, atol=1e-8
        )


def test_addons_know_their_base_and_need_no_gradient(tiny_model, tokens):
    model = tiny_model("llama")
    addon = fit_together(model, plans(2), tokens, progress=False)["csa2"]
    addon.check_base(model)
    assert not any(p.requires_grad for p in addon.pipelines.parameters())
    assert all(p.dtype == model.dtype for p in addon.pipelines.parameters())


def test_too_little_text_is_refused_before_the_model_runs(tiny_model, tokens):
    with pytest.raises(CorpusError, match="give it a longer text"):
        fit_together(tiny_model("llama"), plans(2), tokens[:1], progress=False)
    with pytest.raises(CorpusError, match="at least one token"):
        fit_together(tiny_model("llama"), plans(2), tokens[:0], progress=False)


def test_low_rank_terms_of_each_plan_are_those_of_a_single_fit(tiny_model, tokens):
    model = tiny_model("llama", dtype=torch.float64)
    plan = plans(2)["csa2"]
    both = {"with": plan.replace(lora={"rank": 2}), "without": plan}
    made = fit_together(model, both, tokens, progress=False)
    alone = fit(model, both["with"], tokens, progress=False)
    assert made["without"].lora is None
    ours, theirs = made["with"].lora.state_dict(), alone.lora.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert {weight.dtype for weight in ours.values()} == {torch.float64}
