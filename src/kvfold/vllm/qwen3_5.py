"""Qwen3.5 and Qwen3.6: Gated DeltaNet layers, with attention in every fourth.

Text only: of a checkpoint that reads pictures as well, what reads them is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from vllm.compilation.decorators import ignore_torch_compile
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5Model,
    Qwen3_5MoeForCausalLM,
)

from kvfold.vllm.decoder import FoldedCausal, FoldedDecoder
from kvfold.vllm.skipping import Skipping

LEFT_OUT = ("model.visual.", "visual.", "mtp.")
"""Parts of a checkpoint that are no part of the text model: its eyes, and its draft layers."""


@ignore_torch_compile
class KvfoldQwen35Model(FoldedDecoder, Qwen3_5Model):
    """Its decoder."""


class FoldedQwen35(FoldedCausal):
    """Beside the causal models of dense and of mixed ones."""

    decoder_class = KvfoldQwen35Model

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The checkpoint's weights; raises `AddOnError` if they are another base's."""
        loaded = super().load_weights(
            (name, tensor) for name, tensor in weights if not name.startswith(LEFT_OUT)
        )
        if isinstance(self.model.kvfold, Skipping):
            self.model.kvfold.passes.weights_loaded()
        return loaded


class KvfoldQwen35ForCausalLM(FoldedQwen35, Qwen3_5ForCausalLM):
    """Qwen3.5 under an add-on."""


class KvfoldQwen35MoeForCausalLM(FoldedQwen35, Qwen3_5MoeForCausalLM):
    """Qwen3.5 as a mixture of experts under an add-on."""
