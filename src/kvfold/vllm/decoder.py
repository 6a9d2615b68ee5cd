"""What all families share: a stock vLLM model is made first and then taken over in place.

vLLM's causal models build their decoders themselves, so the decoder of a finished one gets another
class, which differs in its forward only. It must not be compiled: vLLM's warm-up would trace the
branch that runs without any metadata, and that alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from kvfold.vllm.checkpoint import checked, experts_of
from kvfold.vllm.fold import Folding
from kvfold.vllm.settings import Settings
from kvfold.vllm.skipping import Skipping

if TYPE_CHECKING:
    Base = Any
else:
    Base = object


class FoldedDecoder(Base):
    """Beside a family's decoder class: runs it folded, or skips its upper layers."""

    kvfold: Folding | Skipping

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states of the step's tokens, (tokens, hidden)."""
        if isinstance(self.kvfold, Skipping):
            given = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            return self.kvfold.forward(self, given, positions)
        output: Any = None
        for rows in self.kvfold.parts():
            if rows is None:
                return super().forward(
                    input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
                )
            part = super().forward(
                None if input_ids is None else input_ids[rows],
                positions[..., rows],
                intermediate_tensors,
                None if inputs_embeds is None else inputs_embeds[rows],
                **kwargs,
            )
            if output is None:
                output = part.new_zeros(positions.shape[-1], part.shape[-1])
            output.index_copy_(0, rows, part)
        return output


class FoldedCausal(Base):
    """Beside a family's causal model: makes its decoder a folded one, and checks the weights."""

    decoder_class: ClassVar[type]

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        decoder = self.model
        config = vllm_config.model_config.hf_config
        loaded = Settings.of(config).load(
            dtype=vllm_config.model_config.dtype, device=next(decoder.parameters()).device
        )
        self.base_name = str(vllm_config.model_config.model)
        self.experts = experts_of(vllm_config.model_config)
        loaded.check(config, self.base_name)
        decoder.__class__ = self.decoder_class
        decoder.do_not_compile = True
        if loaded.skips:
            decoder.kvfold = Skipping(decoder, loaded)
        else:
            decoder.kvfold = Folding(decoder, config, loaded, vllm_config, f"{prefix}model")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The checkpoint's weights; raises `AddOnError` if they are another base's."""
        addon = self.model.kvfold.loaded.addon
        loaded: set[str] = super().load_weights(
            checked(weights, addon, self.base_name, self.experts)
        )
        return loaded
