"""Qwen2 and Qwen3, also as a mixture of experts."""

from __future__ import annotations

from vllm.compilation.decorators import ignore_torch_compile
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM, Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM, Qwen3Model
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeModel

from kvfold.vllm.decoder import FoldedCausal, FoldedDecoder


@ignore_torch_compile
class KvfoldQwen2Model(FoldedDecoder, Qwen2Model):
    """The decoder of Qwen2."""


class KvfoldQwen2ForCausalLM(FoldedCausal, Qwen2ForCausalLM):
    """Qwen2 under an add-on."""

    decoder_class = KvfoldQwen2Model


@ignore_torch_compile
class KvfoldQwen3Model(FoldedDecoder, Qwen3Model):
    """The decoder of Qwen3."""


class KvfoldQwen3ForCausalLM(FoldedCausal, Qwen3ForCausalLM):
    """Qwen3 under an add-on."""

    decoder_class = KvfoldQwen3Model


@ignore_torch_compile
class KvfoldQwen3MoeModel(FoldedDecoder, Qwen3MoeModel):
    """The decoder of Qwen3 as a mixture of experts."""


class KvfoldQwen3MoeForCausalLM(FoldedCausal, Qwen3MoeForCausalLM):
    """Qwen3 as a mixture of experts under an add-on."""

    decoder_class = KvfoldQwen3MoeModel
