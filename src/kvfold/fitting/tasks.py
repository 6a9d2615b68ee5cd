"""From the problems that methods declare to sums over the text and closed-form weights.

Problems of one stage that read the same features share one Gram matrix. Targets that are keys of
a layer with a k_norm are divided by their root mean square, head by head: the norm that follows
leaves only their direction, so a token with long keys must not weigh more than one with short
keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvfold.anatomy import Anatomy
from kvfold.fitting.components import (
    SKETCH_WIDTH,
    Code,
    principal_components,
    reduced_rank,
    sketch_columns,
    source_scales,
)
from kvfold.fitting.dispersion import Stretch, stretch_keys
from kvfold.fitting.gram import Gram, Sketch, exact_dtype
from kvfold.fitting.ridge import fit_linears
from kvfold.fitting.workers import ALONE, Workers
from kvfold.methods import (
    Activations,
    Components,
    Problem,
    Regression,
    Source,
    unit_rms_heads,
)


def target_of(anatomy: Anatomy, source: Source, activations: Activations) -> Tensor:
    """What a map to this source aims at: it, or the directions of its keys under a k_norm."""
    layer = anatomy.layers[source.layer] if source.kind != "hidden" else None
    if layer is not None and source.kind == "keys" and layer.k_norm != "none":
        return unit_rms_heads(activations[source], layer.head_dim)
    return activations[source]


class HasProblems(Protocol):
    """What has weights that follow from sums over the text."""

    def problems(self) -> tuple[Problem, ...]:
        """What is fitted on what."""


class Task(Protocol):
    """One set of sums over the text, and the weights that follow from them."""

    name: str
    sources: frozenset[Source]
    unknowns: int

    def add(self, activations: Activations) -> None:
        """Take in the activations of one batch."""

    def add_up(self, workers: Workers) -> None:
        """Have the sums of all workers, the same in each."""

    def clear(self) -> None:
        """Forget the sums: another worker has them."""

    def solve(self, ridge: float, key_dispersion: float) -> None:
        """Write the weights."""

    def state_dict(self) -> dict[str, Any]:
        """The sums so far."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""


class RegressionTask:
    """All regressions on the same features."""

    def __init__(self, problems: list[Regression], anatomy: Anatomy, device: torch.device) -> None:
        self.problems = problems
        self.anatomy = anatomy
        self.name = problems[0].features_key
        self.unknowns = problems[0].linear.in_features
        self.sources = frozenset(
            source for problem in problems for source in (*problem.sources, problem.target)
        )
        widths = {str(problem.target): problem.linear.out_features for problem in problems}
        self.gram = Gram(self.unknowns, widths, device)

    def add(self, activations: Activations) -> None:
        """Add to the Gram matrix and to each target's products."""
        targets = {
            str(problem.target): target_of(self.anatomy, problem.target, activations)
            for problem in self.problems
        }
        self.gram.add(self.problems[0].features(activations), targets)

    def add_up(self, workers: Workers) -> None:
        """Have the Gram matrix of all workers."""
        self.gram.add_up(workers)

    def clear(self) -> None:
        """Forget all rows."""
        self.gram.clear()

    def solve(self, ridge: float, key_dispersion: float) -> None:
        """Ridge regression for every target; keys are stretched to vary as the real ones do."""
        targets = {str(problem.target): problem.target for problem in self.problems}
        linears = {str(problem.target): problem.linear for problem in self.problems}
        stretch = stretch_keys(self.anatomy, key_dispersion)

        def finish(
            name: str, linear: nn.Linear, variance: Tensor, predicted: Tensor, mean: Tensor
        ) -> None:
            stretch(targets[name], linear, variance, predicted, mean)

        fit_linears(self.gram, linears, ridge=ridge, name=self.name, finish=finish)

    def state_dict(self) -> dict[str, Any]:
        """The Gram matrix."""
        return self.gram.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.gram.load_state_dict(state)


class ComponentsTask:
    """One code for a stack of sources.

    workers: those that take in other rows; their sketches share the first one's scale.
    """

    def __init__(
        self,
        problem: Components,
        anatomy: Anatomy,
        device: torch.device,
        workers: Workers = ALONE,
    ) -> None:
        self.workers = workers
        self.problem = problem
        self.anatomy = anatomy
        self.device = device
        self.name = f"a code of {', '.join(str(source) for source in problem.inputs)}"
        self.sources = frozenset({*problem.inputs, *problem.targets})
        self.own = problem.inputs == problem.targets
        self.rank = problem.encoder.out_features
        self.unknowns = self.rank if self.own else problem.encoder.in_features
        self.widths = tuple(problem.decoders[target].out_features for target in problem.targets)
        self.gram: Gram | Sketch | None = None

    def add(self, activations: Activations) -> None:
        """Add to the stack's second moments, and to the targets' if they are others."""
        features = self.problem.features(activations)
        if self.gram is None:
            self.gram = self._moments(features)
        if isinstance(self.gram, Sketch) or self.own:
            self.gram.add(features)
        else:
            targets = {
                str(target): target_of(self.anatomy, target, activations)
                for target in self.problem.targets
            }
            self.gram.add(features, targets)

    def _moments(self, features: Tensor) -> Gram | Sketch:
        width = self.problem.encoder.in_features
        columns = sketch_columns(self.rank, width)
        if self.own and width > SKETCH_WIDTH and 2 * columns < width:
            rows = exact_dtype(features).reshape(-1, width)
            scale = source_scales(rows.var(0, correction=0).double(), self.widths)
            scale = self.workers.all_of_first(scale)
            return Sketch(width, columns, scale, self.device)
        targets = {} if self.own else {str(t): w for t, w in self._target_widths()}
        return Gram(width, targets, self.device)

    def _target_widths(self) -> Iterable[tuple[Source, int]]:
        return zip(self.problem.targets, self.widths, strict=True)

    def add_up(self, workers: Workers) -> None:
        """Have the sums of all workers, each of which must have seen some rows or none."""
        if self.gram is not None:
            self.gram.add_up(workers)

    def clear(self) -> None:
        """Forget all rows."""
        if self.gram is not None:
            self.gram.clear()

    def solve(self, ridge: float, key_dispersion: float) -> None:
        """Principal components, or reduced-rank regression; keys are stretched likewise."""
        assert self.gram is not None
        if self.own or isinstance(self.gram, Sketch):
            code = principal_components(self.gram, self.widths, self.rank)
        else:
            names = tuple(str(target) for target in self.problem.targets)
            code = reduced_rank(self.gram, names, self.rank, ridge=ridge, name=self.name)
        _write_code(self.problem, self.widths, code, stretch_keys(self.anatomy, key_dispersion))

    def state_dict(self) -> dict[str, Any]:
        """The sums and of which kind they are."""
        if self.gram is None:
            return {}
        return {"sketched": isinstance(self.gram, Sketch), "sums": self.gram.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        if not state:
            self.gram = None
            return
        width = self.problem.encoder.in_features
        if state["sketched"]:
            columns = sketch_columns(self.rank, width)
            self.gram = Sketch(width, columns, state["sums"]["scale"], self.device)
        else:
            targets = {} if self.own else {str(t): w for t, w in self._target_widths()}
            self.gram = Gram(width, targets, self.device)
        self.gram.load_state_dict(state["sums"])


@torch.no_grad()
def _write_code(problem: Components, widths: tuple[int, ...], code: Code, stretch: Stretch) -> None:
    """Weights of a code that may have fewer values than were asked for: the rest stay zero."""
    found = len(code.encoder)
    problem.encoder.weight.zero_()
    problem.encoder.weight[:found].copy_(code.encoder)
    start = 0
    for target, width in zip(problem.targets, widths, strict=True):
        linear = problem.decoders[target]
        part = slice(start, start + width)
        linear.weight.zero_()
        linear.weight[:, :found].copy_(code.decoder[part])
        linear.bias.copy_(code.bias[part])
        stretch(target, linear, code.variance[part], code.predicted[part], code.mean[part])
        start += width


def stages(methods: Iterable[HasProblems]) -> list[int]:
    """The stages that some method is fitted in, in order."""
    return sorted({problem.stage for method in methods for problem in method.problems()})


def tasks_of_stage(
    methods: Iterable[HasProblems],
    stage: int,
    anatomy: Anatomy,
    device: torch.device,
    workers: Workers = ALONE,
) -> list[Task]:
    """The tasks of one stage, each with empty sums, in the same order on every worker."""
    problems: list[Problem] = [
        problem for method in methods for problem in method.problems() if problem.stage == stage
    ]
    shared: dict[str, list[Regression]] = {}
    tasks: list[Task] = []
    for problem in problems:
        if isinstance(problem, Regression):
            shared.setdefault(problem.features_key, []).append(problem)
        else:
            tasks.append(ComponentsTask(problem, anatomy, device, workers))
    tasks.extend(RegressionTask(group, anatomy, device) for group in shared.values())
    return tasks
