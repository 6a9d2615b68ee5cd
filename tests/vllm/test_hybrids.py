"""What the front end sets and refuses for hybrids, before any worker starts."""

from __future__ import annotations

import pytest
import torch

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("torchvision", reason="vLLM's Qwen3.5 needs it: make test-vllm")

from kvfold.vllm.scheduling import SCHEDULER

KERNELS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
PLAN = Plan.from_dict(
    {
        "depth": [{"method": "csa2", "source": 1, "readers": [3]}],
        "sequence": [{"method": "pool", "layers": [5], "group": 3}],
    }
)


def front_end(folder, config, addon, **settings):
    """vLLM's whole configuration, as its front end makes it."""
    from vllm import EngineArgs
    from vllm.plugins import load_general_plugins

    from kvfold.vllm.settings import Settings

    load_general_plugins()
    overrides = Settings(str(addon)).overrides(config)
    arguments = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 512}
    made = EngineArgs(str(folder), hf_overrides=overrides, **{**arguments, **settings})
    return made.create_engine_config()


def test_states_are_float32_and_chunks_end_where_prefixes_can_be_shared(tiny_folder, random_addon):
    model, folder = tiny_folder("qwen3_5", dtype=torch.bfloat16, **KERNELS)
    _, addon = random_addon(model, PLAN)
    made = front_end(folder, model.config, addon, enable_prefix_caching=True)
    assert made.cache_config.mamba_ssm_cache_dtype == "float32"
    assert made.scheduler_config.scheduler_cls == SCHEDULER
    assert made.cache_config.prefix_match_unit == 24
    plain = front_end(folder, model.config, addon, enable_prefix_caching=False)
    assert plain.scheduler_config.scheduler_cls is None
    for settings, reason in [
        ({"dtype": "float32"}, "in bfloat16 only"),
        ({"enable_prefix_caching": True, "scheduler_cls": "my.Scheduler"}, "of its own"),
    ]:
        with pytest.raises(ValueError, match=reason):
            front_end(folder, model.config, addon, **settings)


def test_heads_that_no_kernel_serves_are_refused(tiny_folder, random_addon):
    model, folder = tiny_folder("qwen3_5", dtype=torch.bfloat16)
    _, addon = random_addon(model, PLAN)
    with pytest.raises(ValueError, match="this model's have 16 and 16"):
        front_end(folder, model.config, addon)
