"""Rows that run through each layer of a model in vLLM, counted by the layers themselves.

For `LLM.apply_model`, whose functions go by their names to the engine's processes.
"""

from __future__ import annotations

from typing import Any


def count_rows(model: Any) -> None:
    """Let each layer of an engine's model count the rows that run through it."""
    model.rows = [0] * len(model.model.layers)

    def counter(number: int) -> Any:
        def count(module: Any, args: Any, output: Any) -> None:
            model.rows[number] += len(output)

        return count

    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(counter(number))


def take_rows(model: Any) -> list[int]:
    """What was counted since the last time."""
    rows, model.rows = model.rows, [0] * len(model.rows)
    return list(rows)
