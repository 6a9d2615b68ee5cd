"""Whether what a step has put into a cache is finite: what is not would spoil all that follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.errors import CacheError
from kvfold.methods import Pipeline
from kvfold.methods.turboquant import LARGEST_SCALE
from kvfold.runtime.schedule import Step
from kvfold.runtime.slots import SlotStore


def require_all_finite(
    made: Sequence[tuple[Pipeline, Step, Tensor]],
    stores: Sequence[tuple[Sequence[int], SlotStore]],
    seen: int,
) -> None:
    """Raise `CacheError` for a record, or a slot that was quantised, that is not finite.

    One look a step, so one wait for the device. made: records by pipeline. stores: with the layers
    that they are of. seen: tokens of the longest row before the step.
    """
    flags = [torch.isfinite(records).all() for *_, records in made]
    scaled = [(layers, part, part.take_finite()) for layers, part in stores]
    flags += [flag for *_, flag in scaled if flag is not None]
    if not flags or bool(torch.stack(flags).all()):
        return
    for pipeline, step, records in made:
        require_finite(records, step, pipeline)
    at_fault = [found for found in scaled if found[2] is not None and not bool(found[2])]
    layers, part, _ = at_fault[0]
    raise _not_quantisable(layers, part, seen)


def _not_quantisable(layers: Sequence[int], part: SlotStore, seen: int) -> CacheError:
    """What is wrong with slots that have no finite scale."""
    if part.is_too_large():
        return CacheError(
            f"quantised slots have one float16 scale each, so the root mean square of a slot's "
            f"values must be at most {LARGEST_SCALE:,.0f}; that of layers {list(layers)}, made "
            f"after token {seen}, is larger; leave these layers out of the plan's bits"
        )
    return CacheError(
        f"slots must be finite to be quantised; those of layers {list(layers)} made after token "
        f"{seen} are not, though their tokens' codes are: the add-on's maps overflow; load the "
        "model in bfloat16 or float32, or fit again"
    )


def require_finite(records: Tensor, step: Step, pipeline: Pipeline) -> None:
    """Raise `CacheError` naming layers and token where a record (batch, new, width) is not finite.

    Pads are looked at too: they are not stored, but tell of the same fault.
    """
    finite = torch.isfinite(records).all(dim=-1)
    if bool(finite.all()):
        return
    row, column = (~finite).nonzero()[0].tolist()
    position = step.after[row] - step.new + column
    raise CacheError(
        f"keys and values must be finite; the {pipeline.depth.name} code of layers "
        f"{list(pipeline.layers)} has NaN or infinity at token {position} of row {row}: the "
        "model's activations overflow its dtype or the add-on is damaged; load the model in "
        "bfloat16 or float32"
    )
