"""The base model's weights on their way into vLLM: checked, and with an add-on's LoRA merged in.

Every process reads the checkpoint anyway, tensor by tensor and before it is divided among devices.
That is the moment to compare it with what the add-on was fitted to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.methods import Lora
from kvfold.store.addon import AddOn
from kvfold.store.fingerprint import Fingerprint, sample, sampled_places

IN_LAYERS = re.compile(r"^(?!mtp\.)(?:.*\.)?layers\.(\d+\..+)$")
"""A parameter's name within the text decoder's layers, as fingerprints have it. Layers that only
draft tokens have layers of their own.
"""
OF_EXPERT = re.compile(
    r"^(?P<layer>\d+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight$"
)
"""One expert's weights, whose values are rows of the model's `experts.gate_up_proj` (first those of
the gate) or of its `experts.down_proj`."""


def experts_of(model_config: Any) -> int:
    """How many experts a layer of a vLLM model has; 0 if it is no mixture of them."""
    return int(getattr(model_config.hf_text_config, "num_experts", 0) or 0)


def checked(
    weights: Iterable[tuple[str, Tensor]], addon: AddOn, name: str, experts: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """The same weights, with the add-on's low-rank terms merged into those they act on.

    name: of the model, for the message. experts: how many a layer has, in a mixture of them. Raises
    `AddOnError` when all have passed and were not those of the add-on's base.
    """
    samples = _Samples(addon.base, experts)
    for full, tensor in weights:
        match = IN_LAYERS.search(full)
        if match is not None:
            samples.take(match[1], tensor)
        merged = (
            tensor if match is None or addon.lora is None else _merged(match[1], tensor, addon.lora)
        )
        yield full, merged
    samples.check(name)


def check_folder(folder: Path, addon: AddOn, name: str, experts: int = 0) -> bool:
    """Check a folder's safetensors files without loading them; whether there were any.

    Raises `AddOnError` if they are not the weights of the add-on's base.
    """
    from safetensors import safe_open

    samples = _Samples(addon.base, experts)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for full in file.keys():  # noqa: SIM118
                match = IN_LAYERS.search(full)
                if match is not None and samples.wanted(match[1]):
                    samples.take(match[1], file.get_tensor(full))
    if samples.any:
        samples.check(name)
    return samples.any


class _Samples:
    """What is found in a checkpoint of the weights that a base is known by.

    Checkpoints may have a tensor for each expert of a layer where the model has one for all.
    """

    def __init__(self, base: Fingerprint, experts: int) -> None:
        self.base, self.experts = base, experts
        self.counts = base.counts
        self.found: dict[str, list[float]] = {}
        self.dtype = torch.float32

    @property
    def any(self) -> bool:
        """Whether anything was found."""
        return bool(self.found)

    def wanted(self, name: str) -> bool:
        """Whether a parameter, by its name within the layers, may have something of it."""
        expert = OF_EXPERT.match(name)
        return (name if expert is None else _of_all(expert)) in self.counts

    def take(self, name: str, tensor: Tensor) -> None:
        """Look at a parameter."""
        if not self.wanted(name):
            return
        expert = OF_EXPERT.match(name)
        if expert is None:
            self.found[name] = list(sample(tensor, self.counts[name]))
        else:
            self._take_expert(_of_all(expert), int(expert["expert"]), expert["part"], tensor)
        self.dtype = tensor.dtype

    def _take_expert(self, name: str, expert: int, part: str, tensor: Tensor) -> None:
        """The values of one expert's part that are places of the tensor of all."""
        size, parts = tensor.numel(), 1 if part == "down" else 2
        before = (expert * parts + (part == "up")) * size
        count = self.counts[name]
        held = self.found.setdefault(name, [math.nan] * count)
        for number, place in enumerate(sampled_places(self.experts * parts * size, count)):
            if before <= place < before + size:
                held[number] = float(tensor.flatten()[place - before])

    def check(self, name: str) -> None:
        """Raise `AddOnError` unless they are those of the base. name: of the model."""
        self.base.check_samples(self.found, self.dtype, name)


def _of_all(expert: re.Match[str]) -> str:
    """The parameter of all experts that one of a single expert is a part of."""
    joined = "down_proj" if expert["part"] == "down" else "gate_up_proj"
    return f"{expert['layer']}.{joined}"


def _merged(name: str, weight: Tensor, lora: Lora) -> Tensor:
    """A projection's weight with its term, `W + scale * B A`; others as they are."""
    for layer, projection, term in lora.terms():
        if name == f"{layer}.self_attn.{projection}_proj.weight":
            added = term.b.float() @ term.a.float() * term.scale
            return (weight.float() + added.to(weight.device)).to(weight.dtype)
    return weight
