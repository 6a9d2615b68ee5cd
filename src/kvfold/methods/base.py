"""What every method of the depth axis is: an encoder to one stored code, decoders back to layers.

A method serves the history of some layers. At write it makes one *code* of `code_width` values a
token from its declared `inputs`; at read it turns a code into one layer's keys and values. Both
work on pre-norm, pre-RoPE tensors, flattened to (batch, seq, width): the layer's own k_norm and
RoPE follow later and are not the method's business. Methods see tensors only, never a cache, a
hook or a model.

How a method is fitted it declares as data too (`problems`): which linear maps regress what on
what, or which codes are principal components. The fitting package solves them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor, nn

SourceKind = Literal["hidden", "inputs", "keys", "values"]


@dataclass(frozen=True, order=True)
class Source:
    """One activation of the base model.

    hidden: the output of the first `layer` layers, (batch, seq, hidden). inputs: what the
    attention or linear attention of layer `layer` projects, after the layer's input norm, (batch,
    seq, hidden). keys and values: those of attention layer `layer`, (batch, seq, kv_width),
    pre-norm and pre-RoPE.
    """

    kind: SourceKind
    layer: int

    def __str__(self) -> str:
        if self.kind == "hidden":
            return f"H_{self.layer}"
        name = "attention input" if self.kind == "inputs" else self.kind
        return f"{name} of layer {self.layer}"


Activations = Mapping[Source, Tensor]
"""Activations by name, each (batch, seq, width)."""


class CodePart(NamedTuple):
    """`heads` neighbouring vectors of `width` values in a code, and what they hold.

    Parts are what a pooling gate may weigh apart, and what is quantised as one vector.
    """

    kind: Literal["keys", "values", "both"]
    heads: int
    width: int


def kv_parts(kv_heads: int, head_dim: int) -> tuple[CodePart, ...]:
    """The parts of a code that is one layer's [K; V]."""
    return CodePart("keys", kv_heads, head_dim), CodePart("values", kv_heads, head_dim)


class AffineMap(NamedTuple):
    """`y = weight @ x + bias` with weight (outputs, code_width) and bias (outputs,)."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Regression:
    """Fit `linear` so that it predicts `target` from `features(activations)`.

    Regressions with equal `features_key` in a stage share one Gram matrix. Stages are fitted in
    order, each in its own pass, so that later features may carry the error of earlier maps.
    """

    stage: int
    features_key: str
    features: Callable[[Activations], Tensor]
    sources: tuple[Source, ...]
    target: Source
    linear: nn.Linear


@dataclass(frozen=True)
class Components:
    """Fit a code: `encoder` (no bias) from `features(activations)`, `decoders` back to targets.

    inputs == targets: principal components of the stacked targets, each scaled to unit variance;
    features are then the targets side by side. Otherwise: reduced-rank regression of the stacked
    targets on the features.
    """

    stage: int
    features: Callable[[Activations], Tensor]
    inputs: tuple[Source, ...]
    targets: tuple[Source, ...]
    encoder: nn.Linear
    decoders: Mapping[Source, nn.Linear]


Problem = Regression | Components


class DepthMethod(nn.Module, ABC):
    """One entry of a plan's depth axis, with its weights.

    layers: the layers whose history it serves. inputs: what `encode` needs, in its order.
    code_parts: what a code is made of, in order. gate_source: what a pooling gate scores a token
    by; it exists no later than the code. needs_window: whether a token's code exists only after
    its own layers have run, so that a query can't see itself through it.
    """

    name: ClassVar[str]
    layers: tuple[int, ...]
    inputs: tuple[Source, ...]
    code_parts: tuple[CodePart, ...]
    gate_source: Source
    needs_window: bool = False

    @property
    def code_width(self) -> int:
        """Values stored for a token."""
        return sum(part.heads * part.width for part in self.code_parts)

    @abstractmethod
    def encode(self, activations: Activations) -> Tensor:
        """The code of each token: (batch, seq, code_width) from the activations in `inputs`."""

    @abstractmethod
    def decode(self, layer: int, code: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each (batch, seq, kv_width), pre-norm, pre-RoPE.

        code: (batch, seq, code_width).
        """

    def affine_keys(self, layer: int) -> AffineMap | None:
        """`decode`'s map to the layer's keys where it is affine in the code, else None."""
        return None

    def affine_values(self, layer: int) -> AffineMap | None:
        """`decode`'s map to the layer's values where it is affine in the code, else None."""
        return None

    def holds(self, layer: int) -> bool:
        """Whether the code holds this layer's keys and values as they are (decoding is free)."""
        return False

    def problems(self) -> tuple[Problem, ...]:
        """How this method is fitted; empty if it has no weights."""
        return ()

    def parameter_count(self) -> int:
        """How many trained values the method has."""
        return sum(parameter.numel() for parameter in self.parameters())
