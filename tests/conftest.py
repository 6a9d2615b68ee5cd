"""Fixtures that all tests share: tiny random models, the embedded model, the data folder, a
browser.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SHARED: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
SPECIFIC: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR_ATTENTION),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {**LINEAR_ATTENTION, **EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": (["sliding_attention"] + ["full_attention"] * 2) * 2,
            "final_logit_softcapping": 30.0,
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 3}),
    "phi3": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
}
FAMILY_NAMES = tuple(SPECIFIC)

ConfigMaker = Callable[..., Any]
ModelMaker = Callable[..., Any]


def _config(family: str, **overrides: Any) -> Any:
    import transformers

    class_name, specific = SPECIFIC[family]
    settings = {**SHARED, **specific, **overrides}
    return getattr(transformers, class_name)(**settings)


def _shake_vectors(model: Any) -> None:
    """Move norm weights and biases off their constant starts, so that forgetting one shows."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and not name.endswith(("A_log", "dt_bias")):
            parameter.add_(0.2 * torch.randn_like(parameter))


def _model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_config(family, **overrides))
        _shake_vectors(model)
    if "num_experts" in SPECIFIC[family][1]:
        model.set_experts_implementation("eager")  # the grouped one has no float64
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def tiny_config() -> ConfigMaker:
    """`tiny_config(family, **overrides)`: the configuration of a tiny model of that family."""
    return _config


@pytest.fixture(scope="session")
def tiny_model() -> ModelMaker:
    """`tiny_model(family, dtype=..., seed=..., **overrides)`: a tiny random model in eval mode.

    Families: llama mistral qwen2 qwen3 qwen3_moe qwen3_5 qwen3_5_moe gemma3 smollm3 phi3. Weights
    are large enough for attention to be far from uniform. Overrides are configuration keys.
    """
    return _model


def _cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


@pytest.fixture(scope="session")
def cache_argument() -> Callable[[Any, Any], dict[str, Any]]:
    """`model(ids, **cache_argument(model, cache))`: by the name this transformers release uses."""
    return _cache_argument


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """A tokenizer of 261 tokens: every byte is one. Its template has no tools."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<user>", "<answer>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": special[3:]})
    wrapped.chat_template = (
        "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    return wrapped


@pytest.fixture(params=FAMILY_NAMES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The embedded default model in float32 and its tokenizer, converted once per machine."""
    from kvfold.errors import MissingExtraError
    from kvfold.models import load

    try:
        return load("smollm2-135m", dtype=torch.float32)
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of public data sets, or a skip that says how to name it."""
    beside = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("KVFOLD_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set KVFOLD_DATA to one with wikitext-2/ in it")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium as the system has it: none is downloaded."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("KVFOLD_CHROMIUM") or next(
        filter(None, map(shutil.which, BROWSERS)), None
    )
    if found is None:
        pytest.skip(
            f"no Chromium: none of {', '.join(BROWSERS)} is in PATH, nor KVFOLD_CHROMIUM set"
        )
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        yield launched
        launched.close()
