"""How each layer reads its history: expanded, shared or absorbed.

expanded: keys and values of slots are kept, quantised where the plan has bits. shared: only codes
are kept, and keys and values are rebuilt block by block inside attention, but for values where
summing codes is less work. absorbed: keys are never rebuilt outside their rotary part, since logits
come of the codes themselves; the rotary part is kept. A layer whose keys and values the code holds
as they are reads them as `shared` does wherever codes are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch

from kvfold.anatomy import Anatomy, LayerAnatomy
from kvfold.errors import PlanError
from kvfold.methods import DepthMethod, Pipeline
from kvfold.plan import Plan
from kvfold.runtime.layer import Reading


def choose_readings(
    plan: Plan,
    pipelines: Iterable[Pipeline],
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
    pipelines = list(pipelines)
    need = _expanded_bytes(pipelines, anatomy, element_size)
    short = free_bytes is not None and need > free_bytes
    for pipeline in pipelines:
        method = pipeline.depth
        layers = [anatomy.layers[index] for index in method.layers]
        resident: Reading = (
            _best(pipeline, anatomy, short=short) if plan.resident == "auto" else plan.resident
        )
        if method.code_width == 0:
            made.update(dict.fromkeys(method.layers, "dropped"))
        elif resident == "absorbed":
            made.update(_absorbed(method, layers))
        else:
            made.update(dict.fromkeys(method.layers, resident))
    rebuilding = any(reading in ("shared", "absorbed") for reading in made.values())
    if rebuilding and not anatomy.rope_is_static:
        raise PlanError(
            f"resident shared and absorbed rotate old keys again, which rope_type="
            f"{anatomy.rope_type!r} does not allow, since its frequencies change with the length; "
            "use resident: expanded"
        )
    return made


def _best(pipeline: Pipeline, anatomy: Anatomy, *, short: bool) -> Reading:
    """What `auto` means: the fastest that saves what the plan is there to save."""
    if pipeline.holds_all or not anatomy.rope_is_static:
        return "expanded"
    if _pays_to_absorb(pipeline.depth, [anatomy.layers[index] for index in pipeline.layers]):
        return "absorbed"
    return "shared" if pipeline.bits is not None or short else "expanded"


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


def _expanded_bytes(pipelines: list[Pipeline], anatomy: Anatomy, element_size: int) -> int:
    per_token = sum(
        2 * anatomy.layers[index].kv_width / pipeline.group
        for pipeline in pipelines
        for index in pipeline.layers
    )
    return int(per_token * element_size * anatomy.max_positions)
