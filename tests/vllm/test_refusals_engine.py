"""What vLLM's front end refuses for an add-on, before any worker starts."""

from __future__ import annotations

import pytest

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

PLAN = Plan.from_dict({"depth": [{"method": "csa2", "source": 1, "readers": [2]}]})


def front_end(folder, config, addon, **settings):
    """vLLM's whole configuration, as its front end makes it."""
    from vllm import EngineArgs
    from vllm.plugins import load_general_plugins

    from kvfold.vllm.settings import Settings

    load_general_plugins()
    overrides = Settings(str(addon), settings.pop("plan", {})).overrides(config)
    told = settings.pop("kvfold", None)
    if told is not None:
        overrides = {"architectures": overrides["architectures"], **told}
    arguments = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512}
    made = EngineArgs(str(folder), hf_overrides=overrides, **{**arguments, **settings})
    return made.create_engine_config()


def test_settings_and_bases_that_do_not_fit_are_refused(tiny_folder, random_addon):
    model, folder = tiny_folder("llama")
    other, other_folder = tiny_folder("llama", seed=1)
    _, addon = random_addon(model, PLAN)
    assert front_end(folder, model.config, addon).model_config.architecture == (
        "KvfoldLlamaForCausalLM"
    )
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    for settings, reason in [
        ({"pipeline_parallel_size": 2}, "don't run with pipeline parallelism"),
        ({"kv_cache_dtype": "fp8"}, "don't run with kv_cache_dtype=fp8"),
        ({"kv_transfer_config": transfer}, "don't run with KV transfer"),
        ({"speculative_config": drafts}, "don't run with speculative decoding"),
        ({"quantization": "fp8"}, "don't run with quantised weights"),
        ({"data_parallel_size": 2}, "don't run with data parallelism"),
        (
            {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"},
            "don't run with dual batch overlap",
        ),
        ({"load_format": "sharded_state"}, "don't run with load_format=sharded_state"),
        ({"enable_lora": True}, "don't run with LoRA adapters"),
        ({"plan": {"prefill_attention": "exact"}}, "prefill_attention: folded"),
    ]:
        with pytest.raises(ValueError, match=reason):
            front_end(folder, model.config, addon, **settings)
    for overrides, reason in [
        ({}, "need hf_overrides with kvfold"),
        ({"kvfold": {"addon": str(addon.parent / "nowhere")}}, "nowhere"),
    ]:
        with pytest.raises(ValueError, match=reason):
            front_end(folder, model.config, addon, kvfold=overrides)
    with pytest.raises(ValueError, match="sampled weights agree"):
        front_end(other_folder, other.config, addon)
    small, small_folder = tiny_folder("llama", num_hidden_layers=6)
    with pytest.raises(ValueError, match="its number of layers is 6 and not 8"):
        front_end(small_folder, small.config, addon)
