"""What vLLM is told of an add-on, and which plans are refused."""

from __future__ import annotations

import pytest

from kvfold import AddOn
from kvfold.anatomy import anatomy
from kvfold.errors import AddOnError, EngineSettingError, UnsupportedModelError
from kvfold.plan import Plan
from kvfold.vllm.settings import Settings, check_runs

CED = {"method": "ced", "split": 3, "layers": [3, 4, 5]}
SKIP = {"depth": [CED], "prefill": "skip", "window": 16, "replay": 32}


def test_overrides_name_the_familys_class_and_carry_the_settings(tiny_config):
    settings = Settings("folder", {"prefill": "full"})
    config = tiny_config("qwen3")
    overrides = settings.overrides(config)
    assert overrides == {
        "architectures": ["KvfoldQwen3ForCausalLM"],
        "kvfold": {"addon": "folder", "plan": {"prefill": "full"}},
    }
    for key, value in overrides.items():
        setattr(config, key, value)
    assert Settings.of(config) == settings


def test_a_family_without_a_model_is_refused(tiny_config):
    with pytest.raises(EngineSettingError, match=r"Qwen3\.5, Qwen3\.5-MoE; this one is a Phi"):
        Settings("folder").overrides(tiny_config("phi3"))


@pytest.mark.parametrize("given", [None, {}, {"addon": 3}, {"addon": "a", "more": 1}])
def test_overrides_of_another_form_are_refused(tiny_config, given):
    config = tiny_config("llama")
    config.kvfold = given
    with pytest.raises(EngineSettingError, match="kvfold vllm serve"):
        Settings.of(config)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"depth": [CED], "prefill_attention": "exact"}, "prefill_attention: folded"),
        ({**SKIP, "bits": [{"method": "turboquant", "layers": [3, 4, 5]}]}, "a plan with bits"),
        ({**SKIP, "sequence": [{"method": "pool", "layers": [3, 4, 5]}]}, "with sequence"),
        ({**SKIP, "sequence": [{"method": "pool", "layers": [0]}]}, "with sequence"),
        (
            {**SKIP, "depth": [CED, {"method": "identity", "layers": [0]}]},
            "entries for layers below the split 3",
        ),
    ],
)
def test_plans_that_would_not_do_what_they_say_are_refused(tiny_config, plan, reason):
    with pytest.raises(EngineSettingError, match=reason):
        check_runs(Plan.from_dict(plan), anatomy(tiny_config("llama")))


def test_sliding_layers_are_refused(tiny_config):
    plan = Plan.from_dict({"depth": [{"method": "identity", "layers": [1]}]})
    with pytest.raises(UnsupportedModelError, match="sliding-window"):
        check_runs(plan, anatomy(tiny_config("gemma3")))


def test_a_state_projector_that_the_add_on_does_not_have_is_refused(tiny_model, tmp_path):
    model = tiny_model("qwen3_5")
    plan = Plan.from_dict({**SKIP, "depth": [{"method": "ced", "split": 4, "layers": [7]}]})
    AddOn.untrained(model, plan).save_pretrained(tmp_path)
    Settings(str(tmp_path)).load().check(model.config, "base")
    with pytest.raises(EngineSettingError, match="was fitted with one; this one has none"):
        Settings(str(tmp_path), {"state_projector": True}).load().check(model.config, "base")


def test_a_changed_plan_keeps_the_add_ons_weights_and_is_checked_against_its_base(
    tiny_model, tiny_config, tmp_path
):
    model = tiny_model("llama")
    AddOn.untrained(model, Plan.from_dict(SKIP)).save_pretrained(tmp_path)
    loaded = Settings(str(tmp_path), {"prefill": "full"}).load()
    assert not loaded.skips
    assert loaded.pipelines[0].depth is loaded.addon.pipelines[0].depth
    loaded.check(model.config, "base")
    with pytest.raises(AddOnError, match="its hidden size is 64"):
        loaded.check(tiny_config("llama", hidden_size=64), "another")


def test_codes_that_come_late_are_refused_without_a_window(tiny_model, tmp_path):
    """As in kvfold's own runtime; there would be nothing yet where a token looks for itself."""
    model = tiny_model("llama")
    plan = Plan.from_dict({"window": 0, "depth": [{"method": "latent", "layers": [1], "rank": 8}]})
    AddOn.untrained(model, plan).save_pretrained(tmp_path)
    with pytest.raises(EngineSettingError, match=r"window of at least 1: .* got window=0"):
        Settings(str(tmp_path)).load().check(model.config, "base")
    Settings(str(tmp_path), {"window": 1}).load().check(model.config, "base")
