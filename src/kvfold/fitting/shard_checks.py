"""What a recipe may hold for a base model that is spread over its workers.

Every worker has to run the model as often as the others do, and whatever reads a layer's weights
outside its forward has to gather them first. Both hold for all stages; not yet for these.
"""

from __future__ import annotations

from kvfold.errors import FitError
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.workers import Workers
from kvfold.plan import Plan

SELF = "self"


def check_sharded(recipe: Recipe, plan: Plan, workers: Workers) -> None:
    """Raise `FitError` for a recipe that can't run on a model spread over these workers."""
    if workers.count == 1:
        raise FitError(
            "a model is spread over several processes, and this one is alone; start more, as in "
            "torchrun --nproc-per-node 2 -m kvfold fit --recipe FILE --shard --out DIR"
        )
    if any(part.source == SELF for part in recipe.text):
        raise FitError(
            "text that the model writes itself is not for a sharded model, as each worker writes "
            "at its own pace; write it to a file first (kvfold fit without --shard keeps it in "
            "the work folder), or name other text"
        )
    if plan.state_projector:
        raise FitError(
            "a state projector is not for a sharded model: its fit reads whole weights of linear-"
            "attention layers; leave it out of the plan, or fit without --shard"
        )
