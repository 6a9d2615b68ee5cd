"""From the decoder's final hidden states to logits, without running the layers again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.anatomy import require_plain, text_decoder


def plain_hidden_states(model: Any, input_ids: Tensor) -> Tensor:
    """Final hidden states of the model as it is, (batch, seq, hidden), after the final norm.

    input_ids: (batch, seq), without padding. Nothing is cached. Raises `AttachError` while
    an add-on is attached.
    """
    require_plain(model)
    with torch.no_grad():
        output = text_decoder(model)(input_ids=input_ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits of final hidden states: (..., hidden) to (..., vocabulary)."""
    scores: Tensor = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config(decoder=True)
    cap = getattr(config, "final_logit_softcapping", None)
    return scores if cap is None else cap * torch.tanh(scores / cap)
