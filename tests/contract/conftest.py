"""What the contract suite runs over: every method on every architecture, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvfold.anatomy import Anatomy, anatomy
from kvfold.methods import build_methods
from kvfold.plan import Plan
from kvfold.runtime.attach import Attachment, attach
from kvfold.runtime.cache import FoldedCache


def _half(layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers that a group can read for: all but the first."""
    return layers[1:]


METHODS: dict[str, Callable[[tuple[int, ...]], list[dict[str, Any]]]] = {
    "identity": lambda ls: [{"method": "identity", "layers": ls}],
    "drop": lambda ls: [{"method": "drop", "layers": ls}],
    "ced": lambda ls: [{"method": "ced", "split": min(ls), "layers": ls}],
    "ced-one-layer": lambda ls: [{"method": "ced", "split": 1, "layers": [ls[-1]]}],
    "csa2-joint": lambda ls: [{"method": "csa2", "source": ls[0], "readers": _half(ls)}],
    "csa2-separate": lambda ls: [
        {"method": "csa2", "source": ls[0], "readers": _half(ls), "form": "separate"}
    ],
    "csa2-residual": lambda ls: [
        {"method": "csa2", "source": ls[0], "readers": _half(ls), "residual_hidden": 12}
    ],
    "ced-csa2": lambda ls: [
        {"method": "ced", "split": min(1, ls[0]), "layers": [ls[0]]},
        {"method": "csa2", "source": ls[0], "readers": _half(ls)},
    ],
    "latent": lambda ls: [{"method": "latent", "layers": ls, "rank": 24}],
    "latent-two-codes": lambda ls: [
        {"method": "latent", "layers": ls, "rank": 12, "value_rank": 8}
    ],
    "latent-of-hidden": lambda ls: [
        {"method": "latent", "layers": ls, "rank": 20, "split": min(ls)}
    ],
}
NEEDS_WINDOW = ("drop", "latent", "latent-two-codes")
NON_LINEAR = ("csa2-residual",)
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3",
    "smollm3",
    "phi3",
)
READINGS = ("expanded", "shared", "absorbed")


@dataclass
class RandomAddOn:
    """A plan with random weights of moderate size: no fit, so that every part shows."""

    plan: Plan
    methods: nn.ModuleList

    def check_base(self, model: Any) -> None:
        """Any model will do."""


def random_addon(model: Any, plan: Plan, seed: int = 0) -> RandomAddOn:
    """Weights drawn so that regenerated keys and values are about as large as their inputs."""
    methods = build_methods(plan, anatomy(model))
    generator = torch.Generator().manual_seed(seed)
    for parameter in methods.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
        drawn = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
        parameter.data = drawn.to(model.dtype)
    return RandomAddOn(plan, methods)


@dataclass
class Case:
    """One method on one model, with helpers that the contracts share."""

    model: Any
    plan: Plan
    addon: RandomAddOn

    @property
    def anatomy(self) -> Anatomy:
        """Of the model."""
        return anatomy(self.model)

    def attach(self, **changes: Any) -> Attachment:
        """Attach, with some of the plan's keys changed."""
        return attach(self.model, self.addon, plan=self.plan.replace(**changes))

    def run(self, ids: Tensor, cache: FoldedCache, mask: Tensor | None = None) -> Tensor:
        """Logits of the new columns, (batch, seq, vocabulary)."""
        return run(self.model, ids, cache, mask)


def run(model: Any, ids: Tensor, cache: Any = None, mask: Tensor | None = None) -> Tensor:
    """Logits, with the cache given under whichever name this transformers knows."""
    named = {} if cache is None else {cache_name(): cache}
    with torch.no_grad():
        logits: Tensor = model(ids, attention_mask=mask, **named).logits
    return logits


def cache_name() -> str:
    """The name of the cache argument in this transformers."""
    import inspect

    from transformers import LlamaForCausalLM

    names = inspect.signature(LlamaForCausalLM.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def tokens(count: int, rows: int = 1, seed: int = 7) -> Tensor:
    """Random token ids, (rows, count), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (rows, count), generator=generator)


@pytest.fixture(scope="session")
def case(tiny_model: Callable[..., Any]) -> Callable[..., Case]:
    """`case(family, method, **plan)`: a tiny model with a random add-on of that method."""
    models: dict[tuple[str, torch.dtype], Any] = {}

    def make(family: str, method: str, *, dtype: torch.dtype = torch.float64, **keys: Any) -> Case:
        if (family, dtype) not in models:
            models[family, dtype] = tiny_model(family, dtype=dtype)
        model = models[family, dtype]
        depth = METHODS[method](anatomy(model).foldable_layers)
        plan = Plan.from_dict({"anchors": 4, "window": 8, **keys, "depth": depth})
        return Case(model, plan, random_addon(model, plan))

    return make


SAME = 2e-3
"""Allowed difference, relative to the largest value, of two orders of the same computation.

Tensors are float64, but the norms of most models and the whole of a Gated DeltaNet compute in
float32, and random weights amplify its rounding; a wrong position, mask or slot shows as 0.1 or
more.
"""


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to the rounding of the models' own float32 parts."""
    assert ours.shape == theirs.shape
    scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(ours / scale, theirs / scale, atol=SAME, rtol=0)


@pytest.fixture(scope="session")
def helpers() -> Any:
    """`run` and `tokens`, since test files are not importable from each other."""
    from types import SimpleNamespace

    return SimpleNamespace(
        run=run,
        assert_same=assert_same,
        tokens=tokens,
        cache_name=cache_name,
        random_addon=random_addon,
        METHODS=METHODS,
        needs_window=NEEDS_WINDOW,
        non_linear=NON_LINEAR,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise by the names of a test's arguments."""
    grids = {"arch": FAMILIES, "method": tuple(METHODS), "reading": READINGS}
    marks = metafunc.definition.iter_markers("parametrize")
    named = (mark.args[0] for mark in marks)
    own = {name for names in named for name in ([names] if isinstance(names, str) else names)}
    for name, values in grids.items():
        if name in metafunc.fixturenames and name not in own:
            metafunc.parametrize(name, values)
