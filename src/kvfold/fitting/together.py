"""Many plans fitted in one pass over the text.

Comparing plans is the common case, and the model's forward is what a fit costs. So every batch
runs through the model once and feeds the sums of all plans. Codes of the same stack at several
ranks share one set of sums, since each rank's components are the leading ones of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from kvfold.anatomy import Anatomy, anatomy, text_decoder
from kvfold.errors import CorpusError
from kvfold.fitting.dispersion import DEFAULT_STRENGTH
from kvfold.fitting.gram import exact_dtype
from kvfold.fitting.ridge import DEFAULT_RIDGE
from kvfold.fitting.tasks import ComponentsTask, Task, stages, tasks_of_stage
from kvfold.methods import Source, build_methods
from kvfold.plan import Plan
from kvfold.runtime.capture import capture
from kvfold.store.addon import AddOn
from kvfold.store.fingerprint import Fingerprint

TOKENS_PER_BATCH = 2048


def fit_together(
    model: Any,
    plans: Mapping[str, Plan],
    tokens: Tensor,
    *,
    ridge: float = DEFAULT_RIDGE,
    key_dispersion: float = DEFAULT_STRENGTH,
    progress: bool = True,
) -> dict[str, AddOn]:
    """What `fit` would make of each plan, from one pass over the text for every stage.

    tokens: (windows, seq) ids without padding. Raises what `fit` raises; there are no checkpoints
    and no held-out report.
    """
    shape = anatomy(model)
    first = next(text_decoder(model).parameters())
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    methods = {
        name: build_methods(plan, shape).to(first.device, wide) for name, plan in plans.items()
    }
    members: dict[str, list[Any]] = {name: list(made) for name, made in methods.items()}
    for stage in sorted({number for made in members.values() for number in stages(made)}):
        tasks = [
            (plan.anchors, task)
            for name, plan in plans.items()
            for task in tasks_of_stage(members[name], stage, shape, first.device)
        ]
        _check_enough(tokens, tasks)
        leaders = _leaders(tasks)
        label = f"fitting {len(plans)} plans, stage {stage + 1}"
        _one_pass(model, shape, leaders.values(), tokens, label if progress else None)
        for anchors, task in tasks:
            _solve(task, leaders[_key(anchors, task)][1], ridge, key_dispersion)
    fingerprint = Fingerprint.of(model)
    return {
        name: AddOn(
            plan,
            methods[name].to(first.dtype).requires_grad_(False),
            fingerprint,
            {"fit": {"tokens": tokens.numel(), "ridge": ridge, "key_dispersion": key_dispersion}},
        )
        for name, plan in plans.items()
    }


def _key(anchors: int, task: Task) -> tuple[Any, ...]:
    """What tasks must have in common to share their sums."""
    if isinstance(task, ComponentsTask) and task.own:
        return (anchors, task.problem.inputs)
    return (anchors, id(task))


def _leaders(tasks: Iterable[tuple[int, Task]]) -> dict[tuple[Any, ...], tuple[int, Task]]:
    """One task for each set of sums: the one of the largest rank."""
    chosen: dict[tuple[Any, ...], tuple[int, Task]] = {}
    for anchors, task in tasks:
        key = _key(anchors, task)
        if key not in chosen or task.unknowns > chosen[key][1].unknowns:
            chosen[key] = (anchors, task)
    return chosen


def _solve(task: Task, leader: Task, ridge: float, key_dispersion: float) -> None:
    if isinstance(task, ComponentsTask) and isinstance(leader, ComponentsTask):
        task.gram = leader.gram
    task.solve(ridge, key_dispersion)


def _one_pass(
    model: Any,
    shape: Anatomy,
    tasks: Iterable[tuple[int, Task]],
    tokens: Tensor,
    label: str | None,
) -> None:
    tasks = list(tasks)
    sources = frozenset[Source]().union(*(task.sources for _, task in tasks))
    batches = torch.split(tokens, max(1, TOKENS_PER_BATCH // tokens.shape[1]))
    with torch.no_grad():
        for ids in track(batches, label or "", disable=label is None, transient=True):
            seen = {s: exact_dtype(x) for s, x in capture(model, shape, sources, ids).items()}
            for anchors, task in tasks:
                task.add({source: x[:, anchors:] for source, x in seen.items()})


def _check_enough(tokens: Tensor, tasks: Iterable[tuple[int, Task]]) -> None:
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise CorpusError(
            "a fit needs token windows of shape (windows, seq) with at least one token; got "
            f"{tuple(tokens.shape)}; give it a longer text"
        )
    for anchors, task in tasks:
        rows = tokens.shape[0] * max(0, tokens.shape[1] - anchors)
        if rows < task.unknowns:
            raise CorpusError(
                f"{task.name} has {task.unknowns} unknowns per output and needs as many tokens "
                f"beyond the anchors; got {rows}; give it a longer text"
            )
