"""Which base model an add-on belongs to: enough to refuse another, even of the same shape.

Two parts. The shape (architecture, layers, rotary settings) must agree exactly. Some hundred
weights, taken at fixed places of all layers, must agree after both are rounded to either dtype
and to bfloat16, so that one model in float32 and in bfloat16 is the same and a fine-tune of it,
which moves more weights to another bfloat16 value than rounding twice does, is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from kvfold.anatomy import FAMILIES, Anatomy, LayerAnatomy, anatomy, text_decoder
from kvfold.errors import AddOnError
from kvfold.runtime.sharding import gathered

SAMPLES = 512
"""Weights sampled from the whole model, at least one from each floating tensor of a layer."""
AGREEING_FRACTION = 0.98
AGREEING_ACROSS_HALVES = 0.88
"""Sampled weights that must agree; less between float16 and bfloat16, where one side has been
rounded twice and lands beside the other about one time in eleven.
"""
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_LAYERS = TypeAdapter(tuple[LayerAnatomy, ...])
_SAMPLES = TypeAdapter(dict[str, list[float]])


@dataclass(frozen=True)
class Fingerprint:
    """A base model's name, shape, rotary settings and sampled weights.

    name: for messages only. dtype: what the samples were stored in. samples: values by parameter
    name within the text decoder.
    """

    name: str
    anatomy: Anatomy
    rope: str
    dtype: str
    samples: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, model: Any) -> Fingerprint:
        """The fingerprint of a model."""
        return cls(
            name=_name(model),
            anatomy=anatomy(model),
            rope=_rope(model.config),
            dtype=str(model.dtype).removeprefix("torch."),
            samples={name: sample(tensor, count) for name, tensor, count in _sampled(model)},
        )

    def check(self, model: Any) -> None:
        """Raise `AddOnError`, naming both models, unless `model` is the one described here."""
        self.check_config(model.config, _name(model))
        counts = self.counts
        theirs = {
            name: sample(tensor, counts[name])
            for name, tensor, _ in _sampled(model)
            if name in counts
        }
        self.check_samples(theirs, model.dtype, _name(model))

    def check_config(self, config: Any, name: str) -> None:
        """Raise `AddOnError` unless a configuration has the shape and rotary settings of the base.

        name: of the model that it belongs to, for the message.
        """
        mine, its = _shape(self.anatomy), _shape(anatomy(config))
        reason = next(
            (f"{key} is {its[key]} and not {mine[key]}" for key in mine if mine[key] != its[key]),
            None,
        )
        if reason is None and _rope(config) != self.rope:
            reason = f"its rotary settings are {_rope(config)} and not {self.rope}"
        if reason is not None:
            raise self._refusal(name, reason)

    @property
    def counts(self) -> dict[str, int]:
        """How many values `check_samples` compares of each parameter within the layers."""
        return {name: len(values) for name, values in self.samples.items()}

    def check_samples(
        self, theirs: Mapping[str, Sequence[float]], dtype: torch.dtype, name: str
    ) -> None:
        """Raise `AddOnError` unless a model's weights are those of the base.

        theirs: what `sample` gave of its parameters, `counts` values of each. dtype: of those
        parameters. name: of the model, for the message.
        """
        dtypes = (DTYPES.get(self.dtype, torch.float32), dtype)
        agreeing = total = 0
        for parameter, values in self.samples.items():
            total += len(values)
            if parameter not in theirs:
                continue
            its = torch.tensor(theirs[parameter], dtype=torch.float64)
            ours = torch.tensor(values, dtype=torch.float64)
            for rounded in (*dtypes, torch.bfloat16):
                ours, its = ours.to(rounded).double(), its.to(rounded).double()
            agreeing += int((ours == its).sum())
        across = set(dtypes) == {torch.float16, torch.bfloat16}
        if agreeing < (AGREEING_ACROSS_HALVES if across else AGREEING_FRACTION) * total:
            raise self._refusal(
                name,
                f"only {agreeing} of {total} sampled weights agree, as in a fine-tune or a merge",
            )

    def _refusal(self, name: str, reason: str) -> AddOnError:
        return AddOnError(
            f"the add-on was fitted to {self.name!r} and fits no other model; got "
            f"{name!r}: {reason}; load the add-on's base model, or fit an add-on to "
            "this one"
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "family": self.anatomy.family.name,
            "model_type": self.anatomy.model_type,
            "hidden_size": self.anatomy.hidden_size,
            "vocab_size": self.anatomy.vocab_size,
            "max_positions": self.anatomy.max_positions,
            "rope_type": self.anatomy.rope_type,
            "rope": self.rope,
            "layers": [asdict(layer) for layer in self.anatomy.layers],
            "dtype": self.dtype,
            "samples": {name: list(values) for name, values in self.samples.items()},
        }

    def to_json(self) -> str:
        """As JSON text with sorted keys."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, data: Any) -> Fingerprint:
        """Read what `to_dict` made; raises `AddOnError` for anything else."""
        try:
            families = {family.name: family for family in FAMILIES}
            shape = Anatomy(
                family=families[data["family"]],
                model_type=str(data["model_type"]),
                hidden_size=int(data["hidden_size"]),
                vocab_size=int(data["vocab_size"]),
                max_positions=int(data["max_positions"]),
                rope_type=str(data["rope_type"]),
                layers=_LAYERS.validate_python(data["layers"]),
            )
            samples = _SAMPLES.validate_python(data["samples"])
            return cls(
                name=str(data["name"]),
                anatomy=shape,
                rope=str(data["rope"]),
                dtype=str(data["dtype"]),
                samples={name: tuple(values) for name, values in samples.items()},
            )
        except (KeyError, TypeError, ValueError, ValidationError) as error:
            raise AddOnError(
                "an add-on must say which base model it belongs to, in a form that this version "
                f"knows; its entry can't be read ({type(error).__name__}: {error}); fetch or fit "
                "the add-on again"
            ) from error


def _name(model: Any) -> str:
    """The hub id, or the last part of a local folder's path."""
    name = str(getattr(model.config, "name_or_path", "") or "") or type(model).__name__
    return PurePath(name).name if PurePath(name).is_absolute() else name


def _shape(described: Anatomy) -> dict[str, Any]:
    """What must agree, by how it is called in a message."""
    shape: dict[str, Any] = {
        "its architecture": described.family.name,
        "its hidden size": described.hidden_size,
        "its number of layers": described.num_layers,
    }
    for layer in described.layers:
        shape[f"layer {layer.index}"] = layer
    return shape


def _rope(config: Any) -> str:
    text = config.get_text_config(decoder=True)
    return json.dumps(_plain(getattr(text, "rope_parameters", None)), sort_keys=True)


def _plain(value: Any) -> Any:
    """Numbers as floats and tuples as lists, so that a setting reads alike after any loading."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return float(value)


def _sampled(model: Any) -> Iterator[tuple[str, Tensor, int]]:
    """Floating tensors of the layers by name, each with how many values to take from it."""
    layers = text_decoder(model).layers
    named = [
        (name, parameter)
        for name, parameter in layers.named_parameters()
        if parameter.is_floating_point() and parameter.device.type != "meta" and parameter.numel()
    ]
    count = max(1, SAMPLES // max(1, len(named)))
    for name, parameter in named:
        yield name, parameter.detach(), min(count, parameter.numel())


def sample(tensor: Tensor, count: int) -> tuple[float, ...]:
    """Values at some `sampled_places`."""
    tensor = gathered(tensor)
    index = torch.tensor(sampled_places(tensor.numel(), count), device=tensor.device)
    places_in_shape = torch.unravel_index(index, tensor.shape)
    values: list[float] = tensor[places_in_shape].double().cpu().tolist()
    return tuple(values)


def sampled_places(size: int, count: int) -> list[int]:
    """Places spread over so many values, in the order of rows, by the golden section."""
    golden = (math.sqrt(5) - 1) / 2
    return [int(((index + 1) * golden) % 1.0 * size) for index in range(count)]
