"""Low-rank terms on projections of attention layers.

`W x + s B A x` with the base's own weight W, which stays frozen, A of `rank` rows, B of `rank`
columns and s the scale (Hu et al. 2021, *LoRA*). A layer that reads a folded history sees other
keys and values than it was trained on; a small change of what it asks for (q) and of what it makes
of the answer (o) costs few weights and can be merged into W for engines that want plain weights.

B starts at zero, so that before any training the model is exactly the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvfold.anatomy import ProjectionName

SEED = 0
"""Of the start of every A."""


class LowRank(nn.Module):
    """The term of one projection, `scale * B A x`.

    inputs, outputs: of the projection, in values per token. a: (rank, inputs), b: (outputs, rank).
    """

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.zeros(rank, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def draw(self, generator: torch.Generator) -> None:
        """Start A uniformly within 1 / sqrt(inputs), the start of a linear layer."""
        rank, inputs = self.a.shape
        drawn = 2 * torch.rand(rank, inputs, generator=generator, device="cpu") - 1
        with torch.no_grad():
            self.a.copy_(drawn / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the projection of x: (..., inputs) to (..., outputs).

        It is computed, and given back, in the dtype of the weights, whatever that of x.
        """
        low = functional.linear(x.to(self.a.dtype), self.a)
        return functional.linear(low, self.b) * self.scale


class Lora(nn.Module):
    """The terms of all adapted projections.

    widths: inputs and outputs of each projection, by layer and name. rank, scale: of each term.
    """

    def __init__(
        self,
        widths: Mapping[tuple[int, ProjectionName], tuple[int, int]],
        rank: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.scale = scale
        self.adapted: tuple[tuple[int, ProjectionName], ...] = tuple(widths)
        self.layers = nn.ModuleDict()
        generator = torch.Generator().manual_seed(SEED)
        for (layer, name), (inputs, outputs) in widths.items():
            term = LowRank(inputs, outputs, rank, scale)
            if not term.a.is_meta:
                term.draw(generator)
            if str(layer) not in self.layers:
                self.layers[str(layer)] = nn.ModuleDict()
            self._of_layer(layer)[name] = term

    def term(self, layer: int, name: ProjectionName) -> LowRank:
        """The term of one projection."""
        term = self._of_layer(layer)[name]
        assert isinstance(term, LowRank)
        return term

    def terms(self) -> Iterator[tuple[int, ProjectionName, LowRank]]:
        """Every term with its layer and projection, in order."""
        for layer, name in self.adapted:
            yield layer, name, self.term(layer, name)

    def _of_layer(self, layer: int) -> nn.ModuleDict:
        of_layer = self.layers[str(layer)]
        assert isinstance(of_layer, nn.ModuleDict)
        return of_layer
