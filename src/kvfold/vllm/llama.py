"""Llama and what vLLM runs as Llama."""

from __future__ import annotations

from vllm.compilation.decorators import ignore_torch_compile
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel

from kvfold.vllm.decoder import FoldedCausal, FoldedDecoder


@ignore_torch_compile
class KvfoldLlamaModel(FoldedDecoder, LlamaModel):
    """Its decoder."""


class KvfoldLlamaForCausalLM(FoldedCausal, LlamaForCausalLM):
    """Llama under an add-on."""

    decoder_class = KvfoldLlamaModel


class KvfoldMistralForCausalLM(KvfoldLlamaForCausalLM):
    """Mistral, whose layers are Llama's."""
