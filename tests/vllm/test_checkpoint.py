"""The base's weights on their way in: compared with the add-on's base, low-rank terms merged."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from kvfold import AddOn
from kvfold.errors import AddOnError
from kvfold.plan import Plan
from kvfold.vllm.checkpoint import check_folder, checked

PLAN = {"depth": [{"method": "csa2", "source": 1, "readers": [2]}]}


def addon_of(model, **more):
    return AddOn.untrained(model, Plan.from_dict({**PLAN, **more}))


def test_the_bases_own_weights_pass_unchanged(tiny_model):
    model = tiny_model("llama")
    passed = dict(checked(model.state_dict().items(), addon_of(model), "base"))
    assert all(torch.equal(passed[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_of_a_fine_tune_are_refused(tiny_model):
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    with pytest.raises(AddOnError, match="fits no other model; got 'other': only"):
        list(checked(other.state_dict().items(), addon_of(model), "other"))


def test_a_folder_is_checked_without_loading_it(tiny_model, tmp_path):
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    addon = addon_of(model)
    assert not check_folder(tmp_path, addon, "nothing")
    model.save_pretrained(tmp_path)
    assert check_folder(tmp_path, addon, "base")
    other.save_pretrained(tmp_path)
    with pytest.raises(AddOnError, match="got 'other'"):
        check_folder(tmp_path, addon, "other")


def test_experts_are_known_whether_a_checkpoint_has_one_tensor_for_each_or_for_all(
    tiny_model, tmp_path
):
    model = tiny_model("qwen3_moe")
    addon, experts = addon_of(model), model.config.num_experts
    joined = {n for n in addon.base.counts if "experts" in n}
    assert joined
    assert len(dict(checked(model.state_dict().items(), addon, "base", experts)))
    model.save_pretrained(tmp_path)
    split = {}
    for path in tmp_path.glob("*.safetensors"):
        split.update(load_file(path))
    assert any("experts.1.up_proj" in name for name in split)
    assert list(dict(checked(split.items(), addon, "base", experts))) == list(split)
    assert check_folder(tmp_path, addon, "base", experts)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter.mul_(1.1)
    model.save_pretrained(tmp_path)
    with pytest.raises(AddOnError, match="sampled weights agree"):
        check_folder(tmp_path, addon, "tuned", experts)


def test_layers_of_a_draft_are_not_taken_for_the_models_own(tiny_model):
    model = tiny_model("llama")
    weights = {
        **model.state_dict(),
        **{f"mtp.{k.removeprefix('model.')}": v + 1 for k, v in model.state_dict().items()},
    }
    assert len(dict(checked(weights.items(), addon_of(model), "base"))) == len(weights)


def test_low_rank_terms_are_merged_into_their_projections(tiny_model):
    model = tiny_model("llama")
    addon = addon_of(model, lora={"rank": 2, "targets": ["q", "v"]})
    with torch.no_grad():
        for _, _, term in addon.lora.terms():
            term.b.copy_(torch.randn(term.b.shape))
    passed = dict(checked(model.state_dict().items(), addon, "base"))
    x = torch.randn(3, 32)
    changed = set()
    for layer, name, term in addon.lora.terms():
        full = f"model.layers.{layer}.self_attn.{name}_proj.weight"
        changed.add(full)
        expected = x @ model.state_dict()[full].T + term(x)
        assert torch.allclose(x @ passed[full].T, expected, atol=1e-5)
    for name, tensor in model.state_dict().items():
        assert name in changed or torch.equal(passed[name], tensor)
