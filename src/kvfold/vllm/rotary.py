"""RoPE at the positions of slots, which may be fractional.

vLLM's rotary modules look positions up in a table of whole numbers; transformers' own compute
them. The model's keys and queries are turned by vLLM, slots by this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.anatomy import anatomy, rotary, text_decoder
from kvfold.runtime.layer import Rotation


class SlotRotary:
    """Rotations as a configuration's model makes them. Nothing of the model but these exists."""

    def __init__(self, config: Any, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            self.hollow = make(config)
        decoder = text_decoder(self.hollow)
        with torch.device(device):
            decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)
        self.family = anatomy(config).family

    def at(self, positions: Tensor, like: Tensor) -> Rotation:
        """The rotation at positions (slots,), in the dtype of `like`."""
        return Rotation.of(*rotary(self.hollow, self.family, positions[None], like))
