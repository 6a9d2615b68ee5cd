"""Low-rank terms written as a peft adapter add what the add-on adds."""

from __future__ import annotations

import json
import sys
from copy import deepcopy

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.errors import AddOnError, MissingExtraError
from kvfold.plan import Plan
from kvfold.runtime.adapters import adapted
from kvfold.store.addon import AddOn
from kvfold.store.peft_export import CONFIG_FILE, FILES

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.arange(24).reshape(2, 12) % 90 + 3
SAME = 1e-5
"""Logits in float64 but for norms and linear attention."""


def addon_of(model, *targets, **lora):
    layers = anatomy(model).foldable_layers
    plan = Plan.from_dict(
        {
            "depth": [{"method": "identity", "layers": layers}],
            "lora": {"rank": 3, "targets": targets, **lora},
        }
    )
    addon = AddOn.untrained(model, plan)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in addon.lora.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return addon


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def state(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize("targets", ["qo", "qkvo", "v"])
def test_peft_adds_what_the_add_on_adds_and_merges_it(tiny_model, family, targets, tmp_path):
    from peft import PeftModel

    model = tiny_model(family, dtype=torch.float64)
    addon = addon_of(model, *targets, alpha=4.5)
    with adapted(model, addon.lora):
        expected = logits(model)
    assert (expected - logits(model)).abs().max() > 0.01
    addon.export_lora(model, tmp_path / "adapter")
    wrapped = PeftModel.from_pretrained(deepcopy(model), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(wrapped), expected, rtol=0, atol=SAME)
    plain = wrapped.merge_and_unload()
    assert type(plain) is type(model) and set(plain.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=SAME)


def test_the_model_is_only_looked_at(tiny_model, tmp_path):
    model = tiny_model("llama")
    before, modules = state(model), dict(model.named_modules())
    attributes, config = set(vars(model)), model.config.to_dict()
    addon_of(model, "q", "o").export_lora(model, tmp_path / "adapter")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert dict(model.named_modules()) == modules
    assert (set(vars(model)), model.config.to_dict()) == (attributes, config)


def test_only_the_adapter_is_written_with_rank_and_alpha_as_the_plan_has_them(tiny_model, tmp_path):
    model = tiny_model("llama")
    addon_of(model, "q", "o", layers=[4]).export_lora(model, tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == set(FILES)
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6)
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({}, {})
    prefix = "model.layers.4.self_attn"
    assert set(config["target_modules"]) == {f"{prefix}.q_proj", f"{prefix}.o_proj"}


def test_an_export_replaces_another_but_nothing_else(tiny_model, tmp_path):
    model = tiny_model("llama")
    addon = addon_of(model, "q")
    for _ in range(2):
        addon.export_lora(model, tmp_path / "adapter")
    addon.save_pretrained(tmp_path / "addon")
    with pytest.raises(AddOnError, match=f"a peft adapter may replace.* no {CONFIG_FILE}"):
        addon.export_lora(model, tmp_path / "addon")
    AddOn.from_pretrained(tmp_path / "addon")


def test_without_terms_or_for_another_model_there_is_nothing_to_export(tiny_model, tmp_path):
    model = tiny_model("llama")
    with pytest.raises(AddOnError, match="this one's plan has no lora"):
        AddOn.untrained(model, Plan()).export_lora(model, tmp_path / "adapter")
    with pytest.raises(AddOnError, match="base"):
        addon_of(model, "q").export_lora(tiny_model("llama", seed=1), tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_without_peft_the_extra_is_named(tiny_model, tmp_path, monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kvfold\[lora\]'"):
        addon_of(model, "q").export_lora(model, tmp_path / "adapter")
