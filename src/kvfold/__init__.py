"""kvfold cuts the KV cache of a pretrained language model with small learned add-ons.

The names below are loaded when first used, so that importing kvfold costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.anatomy import anatomy
    from kvfold.evaluation.runner import evaluate
    from kvfold.fitting.fit import fit
    from kvfold.models import load
    from kvfold.plan import Plan
    from kvfold.presets import preset
    from kvfold.runtime.attach import attach
    from kvfold.runtime.cache import FoldedCache
    from kvfold.store.addon import AddOn
    from kvfold.store.prefix_store import PrefixStore
    from kvfold.store.snapshot import Snapshot

__version__ = "0.1.0"

__all__ = [
    "AddOn",
    "FoldedCache",
    "Plan",
    "PrefixStore",
    "Snapshot",
    "__version__",
    "anatomy",
    "attach",
    "evaluate",
    "fit",
    "load",
    "preset",
]

_HOMES = MappingProxyType(
    {
        "AddOn": "kvfold.store.addon",
        "FoldedCache": "kvfold.runtime.cache",
        "Plan": "kvfold.plan",
        "PrefixStore": "kvfold.store.prefix_store",
        "Snapshot": "kvfold.store.snapshot",
        "attach": "kvfold.runtime.attach",
        "evaluate": "kvfold.evaluation.runner",
        "fit": "kvfold.fitting.fit",
        "load": "kvfold.models",
        "preset": "kvfold.presets",
    }
)


class _AnatomyModule(ModuleType):
    """The module `kvfold.anatomy`, which can also be called: `kvfold.anatomy(model)`."""

    def __call__(self, model_or_config: Any) -> Any:
        """Describe a model: see `kvfold.anatomy.anatomy`."""
        return vars(self)["anatomy"](model_or_config)


class _Package(ModuleType):
    """This package. The function `anatomy` and the module it lives in share one public name.

    Importing the module binds it to the package, whoever imports it and whenever; at that moment
    it is made callable, so the name means the same in every import order.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "anatomy" and isinstance(value, ModuleType):
            value.__class__ = _AnatomyModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "anatomy":
        return import_module("kvfold.anatomy")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
