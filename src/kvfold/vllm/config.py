"""The front end's checks: what can't be is refused before any worker has started."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.v1.sample.logits_processor import LogitsProcessor

from kvfold.anatomy import anatomy
from kvfold.describe import describe
from kvfold.errors import EngineSettingError
from kvfold.vllm.checkpoint import check_folder, experts_of
from kvfold.vllm.hybrids import adapt_hybrid
from kvfold.vllm.settings import Loaded, Settings

log = logging.getLogger("vllm.kvfold")

REFUSE_PROMPT_LOGPROBS = "kvfold.vllm.config:PromptLogprobsRefused"
PAST_CHECKS = (
    "dummy",
    "ipc_cache",
    "modelexpress",
    "runai_streamer_sharded",
    "sharded_state",
    "tensorizer",
)
"""Formats whose weights may go into a model without being compared with an add-on's base, and
without its low-rank terms."""


class KvfoldConfig(VerifyAndUpdateConfig):
    """What vLLM calls when it has put its configuration together, for kvfold's models."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Check add-on, base and settings; raises what `Settings`, `Loaded.check` and
        `check_engine` do."""
        model = vllm_config.model_config
        check_engine(vllm_config)
        loaded = Settings.of(model.hf_config).load()
        loaded.check(model.hf_config, model.model)
        if Path(model.model).is_dir():
            check_folder(Path(model.model), loaded.addon, model.model, experts_of(model))
        adapt(vllm_config, loaded)
        described = anatomy(model.hf_config)
        if described.is_hybrid:
            adapt_hybrid(vllm_config, loaded)
        log.info("kvfold: %s", describe(loaded.plan, described))

    @classmethod
    def verify_and_update_model_config(cls, model_config: Any) -> None:
        """Nothing: the model's own configuration stays as it is."""


def check_engine(vllm_config: Any) -> None:
    """Raise `EngineSettingError` for settings of vLLM under which an add-on can't run."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    load_format = str(vllm_config.load_config.load_format)
    refused = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA adapters beside the add-on's own": vllm_config.lora_config is not None,
        "KV transfer": vllm_config.kv_transfer_config is not None,
        "data parallelism": parallel.data_parallel_size > 1,
        "quantised weights": bool(
            vllm_config.model_config.quantization or vllm_config.quant_config
        ),
        f"kv_cache_dtype={cache.cache_dtype}": cache.cache_dtype not in ("auto", None),
        f"load_format={load_format}": load_format in PAST_CHECKS,
        "KV offloading": bool(getattr(cache, "kv_offloading_size", None)),
        "dual batch overlap": bool(parallel.use_ubatching),
        "routed experts among its outputs": bool(
            vllm_config.aux_output_config.enable_return_routed_experts
        ),
        "vLLM's second model runner (set VLLM_USE_V2_MODEL_RUNNER=0)": bool(
            vllm_config.use_v2_model_runner
        ),
        "another runner than generate": vllm_config.model_config.runner_type != "generate",
        "disable_hybrid_kv_cache_manager": bool(
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise EngineSettingError(
                f"kvfold's models don't run with {what}; leave it out, or serve the plain model"
            )


def adapt(vllm_config: Any, loaded: Loaded) -> None:
    """Set what an add-on needs: weights by transformers' names, no logprobs of skipped prompts."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "auto" and not model.model_weights:
        # By itself vLLM reads Mistral's own files where they lie beside those.
        load.load_format = "hf"
    if loaded.skips:
        model.logits_processors = [*(model.logits_processors or ()), REFUSE_PROMPT_LOGPROBS]


class PromptLogprobsRefused(LogitsProcessor):
    """Changes nothing; vLLM asks it about each request's parameters before it takes them."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise `EngineSettingError` where logprobs of the prompt are asked for."""
        if sampling_params.prompt_logprobs is not None:
            raise EngineSettingError(
                "prompt_logprobs can't be had of a skipped prompt, most of whose tokens run "
                "through the lower layers only; leave them out, or serve with plan: {prefill: full}"
            )

    def apply(self, logits: Any) -> Any:
        """The logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Yes."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """There is none."""
