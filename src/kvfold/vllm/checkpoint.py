"""The base model's weights on their way into vLLM: checked, and with an add-on's LoRA merged in.

Every process reads the checkpoint anyway, tensor by tensor and before it is divided among devices.
That is the moment to compare it with what the add-on was fitted to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvfold.methods import Lora
from kvfold.store.addon import AddOn
from kvfold.store.fingerprint import sample

IN_LAYERS = re.compile(r"^(?!mtp\.)(?:.*\.)?layers\.(\d+\..+)$")
"""A parameter's name within the text decoder's layers, as fingerprints have it. Layers that only
draft tokens have layers of their own.
"""


def checked(
    weights: Iterable[tuple[str, Tensor]], addon: AddOn, name: str
) -> Iterator[tuple[str, Tensor]]:
    """The same weights, with the add-on's low-rank terms merged into those they act on.

    name: of the model, for the message. Raises `AddOnError` when all have passed and were not
    those of the add-on's base.
    """
    counts = addon.base.counts
    found: dict[str, Sequence[float]] = {}
    dtype = torch.float32
    for full, tensor in weights:
        match = IN_LAYERS.search(full)
        if match is not None and match[1] in counts:
            found[match[1]] = sample(tensor, counts[match[1]])
            dtype = tensor.dtype
        merged = (
            tensor if match is None or addon.lora is None else _merged(match[1], tensor, addon.lora)
        )
        yield full, merged
    addon.base.check_samples(found, dtype, name)


def check_folder(folder: Path, addon: AddOn, name: str) -> bool:
    """Check a folder's safetensors files without loading them; whether there were any.

    Raises `AddOnError` if they are not the weights of the add-on's base.
    """
    from safetensors import safe_open

    counts = addon.base.counts
    found: dict[str, Sequence[float]] = {}
    dtype = torch.float32
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as file:
            for full in file.keys():  # noqa: SIM118
                match = IN_LAYERS.search(full)
                if match is not None and match[1] in counts:
                    tensor = file.get_tensor(full)
                    found[match[1]] = sample(tensor, counts[match[1]])
                    dtype = tensor.dtype
    if found:
        addon.base.check_samples(found, dtype, name)
    return bool(found)


def _merged(name: str, weight: Tensor, lora: Lora) -> Tensor:
    """A projection's weight with its term, `W + scale * B A`; others as they are."""
    for layer, projection, term in lora.terms():
        if name == f"{layer}.self_attn.{projection}_proj.weight":
            added = term.b.float() @ term.a.float() * term.scale
            return (weight.float() + added.to(weight.device)).to(weight.dtype)
    return weight
