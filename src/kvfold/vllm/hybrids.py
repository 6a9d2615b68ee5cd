"""What the front end sets and refuses for models with Gated DeltaNet layers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.config import Qwen3_5ForConditionalGenerationConfig
from vllm.platforms import current_platform

from kvfold.errors import EngineSettingError
from kvfold.vllm.scheduling import SCHEDULER, hash_unit
from kvfold.vllm.settings import Loaded

CPU_HEADS = ({64}, {128})
"""Widths of keys and of values that the kernels of vLLM's CPU build know."""


def adapt_hybrid(vllm_config: Any, loaded: Loaded) -> None:
    """Set what vLLM sets for its own models of the family, and what sharing prefixes needs.

    Raises `EngineSettingError` for settings under which states could not be held or shared.
    """
    cache = vllm_config.cache_config
    check_kernels(vllm_config.model_config)
    Qwen3_5ForConditionalGenerationConfig.verify_and_update_config(vllm_config)
    if cache.mamba_ssm_cache_dtype == "auto":
        cache.mamba_ssm_cache_dtype = "float32"
    if loaded.skips or not cache.enable_prefix_caching:
        return
    scheduling = vllm_config.scheduler_config
    if scheduling.scheduler_cls not in (None, SCHEDULER):
        raise EngineSettingError(
            "a folded hybrid needs a scheduler of its own to share prompts' beginnings; got "
            f"scheduler_cls={scheduling.scheduler_cls!r}; leave it out, or set "
            "enable_prefix_caching=False"
        )
    scheduling.scheduler_cls = SCHEDULER
    if cache.prefix_match_unit is None:
        cache.prefix_match_unit = hash_unit(loaded.plan)


def check_kernels(model_config: Any) -> None:
    """Raise `EngineSettingError` for what this build of vLLM has no kernels for.

    It would end at the first prompt, and other requests with it.
    """
    if not current_platform.is_cpu():
        return
    text = model_config.hf_text_config
    dims = {text.linear_key_head_dim, text.linear_value_head_dim}
    if model_config.dtype != torch.bfloat16:
        raise EngineSettingError(
            "vLLM's CPU build runs Gated DeltaNet layers in bfloat16 only; got "
            f"{model_config.dtype}; set dtype='bfloat16'"
        )
    if dims not in CPU_HEADS:
        raise EngineSettingError(
            "vLLM's CPU build has Gated DeltaNet for heads of 64 or of 128 keys and values; this "
            f"model's have {text.linear_key_head_dim} and {text.linear_value_head_dim}; serve it "
            "with `kvfold serve`"
        )
