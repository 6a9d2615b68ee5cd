"""What is really allocated for a cache, found without asking it: the measure of all bytes told."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvfold.runtime.codes import CodeStore
from kvfold.runtime.slots import CodeSlots, SlotStore


def allocated(cache: Any) -> int:
    """Bytes of every distinct storage that the layers and code stores of a cache can reach."""
    found: dict[int, int] = {}

    def visit(held: Any) -> None:
        if isinstance(held, Tensor):
            storage = held.untyped_storage()
            found[storage.data_ptr() or id(storage)] = storage.nbytes()
        elif isinstance(held, (list, tuple)):
            for value in held:
                visit(value)
        elif isinstance(held, dict):
            visit(list(held.values()))
        elif isinstance(held, (CodeStore, CodeSlots, SlotStore)):
            visit(vars(held))

    visit([[vars(layer) for layer in cache.layers], getattr(cache, "stores", {})])
    return sum(found.values())
