"""Many plans fitted in one pass over the text.

Comparing plans is the common case, and the model's forward is what a fit costs. So every batch
runs through the model once and feeds the sums of all plans. Codes of the same stack at several
ranks share one set of sums, since each rank's components are the leading ones of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from kvfold.anatomy import Anatomy, anatomy, text_decoder
from kvfold.fitting.bar import progress_bar
from kvfold.fitting.closed_form import check_enough, check_windows
from kvfold.fitting.decay import set_kept
from kvfold.fitting.dispersion import DEFAULT_STRENGTH
from kvfold.fitting.frozen import frozen
from kvfold.fitting.gates import (
    GateSettings,
    GateTrainer,
    drawn_row,
    gate_of,
    train_gates,
    trainable,
)
from kvfold.fitting.gram import exact_dtype
from kvfold.fitting.inputs import check_ids, check_mode
from kvfold.fitting.ridge import DEFAULT_RIDGE
from kvfold.fitting.tasks import ComponentsTask, HasProblems, Task, stages, tasks_of_stage
from kvfold.methods import Source, build_lora, build_pipelines, build_state_projector, depth_methods
from kvfold.plan import Plan
from kvfold.runtime.adapters import check_projections
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
    gates: GateSettings | None = None,
    progress: bool = True,
) -> dict[str, AddOn]:
    """What `fit` would make of each plan, from one pass over the text for every stage.

    tokens: (windows, seq) ids without padding. Raises what `fit` raises; there are no checkpoints
    and no held-out report.
    """
    check_mode()
    check_windows(tokens)
    shape = anatomy(model)
    check_ids(shape, "tokens", tokens)
    first = next(text_decoder(model).parameters())
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    pipelines = {
        name: build_pipelines(plan, shape).to(first.device, wide) for name, plan in plans.items()
    }
    loras = {name: build_lora(plan, shape) for name, plan in plans.items()}
    for lora in filter(None, loras.values()):
        check_projections(model, lora)
    projectors = {name: build_state_projector(plan, shape) for name, plan in plans.items()}
    members: dict[str, list[HasProblems]] = {
        name: list(depth_methods(made)) for name, made in pipelines.items()
    }
    for name, projector in projectors.items():
        if projector is not None:
            members[name].append(projector.to(first.device, wide))
    for stage in sorted({number for many in members.values() for number in stages(many)}):
        tasks = [
            (plan.anchors, task)
            for name, plan in plans.items()
            for task in tasks_of_stage(members[name], stage, shape, first.device)
        ]
        for anchors, task in tasks:
            check_enough(tokens, anchors, [task])
        leaders = _leaders(tasks)
        label = f"fitting {len(plans)} plans, stage {stage + 1}"
        _one_pass(model, shape, leaders.values(), tokens, label if progress else None)
        for anchors, task in tasks:
            _solve(task, leaders[_key(anchors, task)][1], ridge, key_dispersion)
    trainers = _trained(model, shape, plans, pipelines, tokens, gates or GateSettings(), progress)
    fingerprint = Fingerprint.of(model)
    with frozen(model):
        kept = {n: set_kept(model, plan, projectors[n], tokens) for n, plan in plans.items()}
    return {
        name: AddOn(
            plan,
            pipelines[name],
            fingerprint,
            {
                "fit": {
                    "tokens": tokens.numel(),
                    "ridge": ridge,
                    "key_dispersion": key_dispersion,
                },
                **({"gates": trainers[name].report()} if name in trainers else {}),
                **kept[name],
            },
            projectors[name],
            loras[name],
        ).to(device=first.device, dtype=first.dtype)
        for name, plan in plans.items()
    }


def _trained(
    model: Any,
    shape: Anatomy,
    plans: Mapping[str, Plan],
    pipelines: Mapping[str, nn.ModuleList],
    tokens: Tensor,
    settings: GateSettings,
    progress: bool,
) -> dict[str, GateTrainer]:
    """Train the gates of every plan that has some; plans that differ in bits alone share them."""
    trainers: dict[str, GateTrainer] = {}
    by_gates: dict[str, GateTrainer] = {}
    for name, made in pipelines.items():
        if trainable(made):
            key = plans[name].replace(bits=()).to_json()
            if key not in by_gates:
                seq = tokens.shape[1]
                by_gates[key] = GateTrainer(model, shape, plans[name], made, seq, settings)
            trainers[name] = by_gates[key]
    if by_gates:
        with frozen(model), progress_bar(progress) as (bar, _):
            shown = bar.add_task(f"gates of {len(by_gates)} plans", total=settings.steps, rate="")
            members = list(by_gates.values())
            row = partial(drawn_row, tokens, settings.seed)
            train_gates(model, shape, members, row, lambda: bar.advance(shown))
    for name, trainer in trainers.items():
        own = {pipeline.layers: pipeline for pipeline in trainable(pipelines[name])}
        for pipeline in trainer.pipelines:
            gate_of(own[pipeline.layers]).load_state_dict(gate_of(pipeline).state_dict())
    return trainers


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
