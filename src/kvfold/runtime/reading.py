"""How each layer reads its history: expanded, shared or absorbed.

expanded: regenerated keys and values are kept. shared: only codes are kept, and keys and values
are rebuilt block by block inside attention. absorbed: attention is computed against the codes
themselves, values always, keys outside their rotary part. A layer whose keys and values the code
holds as they are reads them as `shared` does wherever codes are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch

from kvfold.anatomy import Anatomy, LayerAnatomy
from kvfold.errors import PlanError
from kvfold.methods import DepthMethod
from kvfold.plan import Plan
from kvfold.runtime.layer import Reading


def choose_readings(
    plan: Plan,
    methods: Iterable[DepthMethod],
    anatomy: Anatomy,
    *,
    free_bytes: int | None = None,
    element_size: int = 2,
) -> dict[int, Reading]:
    """The reading of every folded layer under the plan's `resident`.

    free_bytes: memory that `auto` may count on (None: plenty). Raises `PlanError` where an
    explicit choice can't hold.
    """
    made: dict[int, Reading] = {}
    methods = list(methods)
    short = free_bytes is not None and _expanded_bytes(methods, anatomy, element_size) > free_bytes
    for method in methods:
        layers = [anatomy.layers[index] for index in method.layers]
        if method.code_width == 0:
            made.update(dict.fromkeys(method.layers, "dropped"))
        elif plan.resident == "absorbed":
            made.update(_absorbed(method, layers))
        elif plan.resident == "shared":
            made.update(dict.fromkeys(method.layers, "shared"))
        elif plan.resident == "auto" and _pays_to_absorb(method, layers):
            made.update(_absorbed(method, layers))
        elif plan.resident == "auto" and short and len(method.layers) > 1:
            made.update(dict.fromkeys(method.layers, "shared"))
        else:
            made.update(dict.fromkeys(method.layers, "expanded"))
    rebuilding = any(reading in ("shared", "absorbed") for reading in made.values())
    if rebuilding and not anatomy.rope_is_static:
        raise PlanError(
            f"resident shared and absorbed rotate old keys again, which rope_type="
            f"{anatomy.rope_type!r} does not allow, since its frequencies change with the length; "
            "use resident: expanded"
        )
    return made


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device now; None if that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def _absorbed(method: DepthMethod, layers: list[LayerAnatomy]) -> dict[int, Reading]:
    made: dict[int, Reading] = {}
    for layer in layers:
        if method.holds(layer.index):
            made[layer.index] = "shared"
        elif method.affine_values(layer.index) is None:
            raise PlanError(
                f"resident absorbed needs linear maps, but the {method.name} maps of layer "
                f"{layer.index} have a residual MLP; use resident: shared or expanded"
            )
        else:
            made[layer.index] = "absorbed"
    return made


def _pays_to_absorb(method: DepthMethod, layers: list[LayerAnatomy]) -> bool:
    """Whether every reader can absorb keys and values and then reads fewer values a token."""
    readers = [layer for layer in layers if not method.holds(layer.index)]
    return bool(readers) and all(
        layer.rotary_dim < layer.head_dim
        and method.affine_keys(layer.index) is not None
        and method.affine_values(layer.index) is not None
        and method.code_width + layer.kv_heads * layer.rotary_dim <= 2 * layer.kv_width
        for layer in readers
    )


def _expanded_bytes(methods: list[DepthMethod], anatomy: Anatomy, element_size: int) -> int:
    widths = [anatomy.layers[index].kv_width for method in methods for index in method.layers]
    return 2 * sum(widths) * element_size * anatomy.max_positions
