"""Configurations of published hybrids, by the keys and values of their `config.json`.

Only what shapes the model is kept. Qwen3.5-4B and Qwen3.6-27B are multimodal models of one
architecture: a vision tower and, under `text_config`, the decoder whose cache is folded. Three
Gated DeltaNet layers alternate with one gated attention layer. The multi-token head that both
were trained with is no part of transformers' model.
"""

from __future__ import annotations

from typing import Any

ROPE: dict[str, Any] = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000,
    "rope_type": "default",
}
SHARED_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262_144,
    "mtp_num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "vocab_size": 248_320,
}
SHARED_VISION: dict[str, Any] = {
    "model_type": "qwen3_5",
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SHARED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248_056,
    "video_token_id": 248_057,
    "vision_start_token_id": 248_053,
    "vision_end_token_id": 248_054,
}
QWEN35_4B: dict[str, Any] = {
    **SHARED,
    "text_config": {
        **SHARED_TEXT,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "linear_num_value_heads": 32,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "tie_word_embeddings": True,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        **SHARED_VISION,
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 2560,
    },
}
QWEN36_27B: dict[str, Any] = {
    **SHARED,
    "text_config": {
        **SHARED_TEXT,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "output_gate_type": "swish",
        "tie_word_embeddings": False,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        **SHARED_VISION,
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "out_hidden_size": 5120,
    },
}
PUBLISHED: dict[str, dict[str, Any]] = {"Qwen3.5-4B": QWEN35_4B, "Qwen3.6-27B": QWEN36_27B}


def published_config(name: str) -> Any:
    """The multimodal configuration of a published model."""
    from transformers import Qwen3_5Config

    settings = PUBLISHED[name]
    parts = {part: dict(settings[part]) for part in ("text_config", "vision_config")}
    return Qwen3_5Config(**{**settings, **parts})


def published_text_config(name: str) -> Any:
    """The configuration of its decoder alone, as a text-only checkpoint has it."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**PUBLISHED[name]["text_config"])
