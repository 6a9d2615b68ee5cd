"""The lower yardstick of the depth axis: no history at all."""

from __future__ import annotations

from torch import Tensor

from kvfold.methods.base import Activations, DepthMethod, Source


class DropFold(DepthMethod):
    """Stores nothing: its layers see anchors and window only (as in StreamingLLM)."""

    name = "drop"

    def __init__(self, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.inputs = ()
        self.code_parts = ()
        self.gate_source = Source("inputs", layers[0])
        self.needs_window = True

    def encode(self, activations: Activations) -> Tensor:
        """Never called: a method without inputs has nothing to encode."""
        raise NotImplementedError("a dropped history has no code")

    def decode(self, layer: int, code: Tensor) -> tuple[Tensor, Tensor]:
        """Never called: there is no code."""
        raise NotImplementedError("a dropped history has no code")
