"""Candidates measured by what follows a prompt: the one measure that skipping a prompt allows.

Each window is a prompt, which runs as the candidate's plan says, and a continuation, which is
scored (`kvfold.evaluation.continuation`). The plain model reads the same windows, so that losses
are compared window by window. Prefill is timed at the prompt's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from kvfold.anatomy import Anatomy, anatomy
from kvfold.budget import operations_left
from kvfold.errors import EvaluationError
from kvfold.evaluation.candidates import skipped_tokens
from kvfold.evaluation.continuation import continuation_loss, decoding_chunk, summary
from kvfold.evaluation.memory import Memory, memory_at
from kvfold.evaluation.runner import PLAIN, as_picked, check_names, layers_by_residency
from kvfold.evaluation.speed import Speed, SpeedSettings, measure_speed
from kvfold.plan import Plan
from kvfold.runtime.attach import AddOnLike, attach

REPEATS = 3


@dataclass(frozen=True)
class PromptResult:
    """All that was measured of one candidate; plan is None for the plain model.

    losses: of each window's continuation, in nats a token. loss_rise: mean of their differences
    to the plain model's; loss_rise_error: its standard error, None for a single window.
    skipped_tokens: of each prompt. operations_left: see `kvfold.budget`. resident: how many layers
    are held in each way. speed: with the prompt as its history.
    """

    name: str
    plan: dict[str, Any] | None
    loss: float
    perplexity: float
    losses: tuple[float, ...]
    memory: tuple[Memory, ...]
    loss_rise: float = 0.0
    loss_rise_error: float | None = None
    skipped_tokens: int = 0
    operations_left: float = 1.0
    resident: dict[str, int] = field(default_factory=dict)
    speed: Speed | None = None

    @property
    def perplexity_rise(self) -> float:
        """By which share the perplexity is above the plain model's."""
        return math.expm1(self.loss_rise)

    @property
    def perplexity_rise_error(self) -> float | None:
        """The standard error of that share, to first order."""
        error = self.loss_rise_error
        return None if error is None else math.exp(self.loss_rise) * error

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds of one prompt; None where it was not timed."""
        speed = self.speed
        return None if speed is None else speed.history / speed.prefill_tokens_per_second


@dataclass(frozen=True)
class PromptEvaluation:
    """Results, the plain model's first, and what they were measured on.

    prompt, continuation: tokens of each of `windows` windows.
    """

    results: tuple[PromptResult, ...]
    windows: int
    prompt: int
    continuation: int
    dtype: str

    def times_faster(self, result: PromptResult) -> float | None:
        """How many times faster than the plain model a prompt is read; None where not timed."""
        own, plain = result.prefill_seconds, self.results[0].prefill_seconds
        return None if own is None or plain is None else plain / own

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with what follows from the figures."""
        data = asdict(self)
        for made, result in zip(data["results"], self.results, strict=True):
            made["perplexity_rise"] = result.perplexity_rise
            made["perplexity_rise_error"] = result.perplexity_rise_error
            made["prefill_seconds"] = result.prefill_seconds
            made["times_faster"] = self.times_faster(result)
            for entry, memory in zip(made["memory"], result.memory, strict=True):
                entry.update(memory.derived())
        return data


def evaluate_prompts(
    model: Any,
    candidates: Mapping[str, AddOnLike],
    windows: Tensor,
    continuation: int,
    *,
    lengths: tuple[int, ...] = (1024, 4096, 16384),
    speed: bool = True,
    repeats: int = REPEATS,
    batch: int = 1,
    on_progress: Callable[[str], None] | None = None,
) -> PromptEvaluation:
    """Measure every candidate against the plain model on what follows each window's prompt.

    windows: (windows, prompt + continuation) int64. lengths: token counts at which bytes are
    given. repeats: of each timing. batch: windows in one forward. on_progress is told what is
    being measured next. Raises `EvaluationError` for windows without a prompt or a continuation
    and where a loss is not finite, `AddOnError` for an add-on of another model.
    """
    check_names(candidates, lengths)
    if windows.dim() != 2 or not 0 < continuation < windows.shape[1]:
        raise EvaluationError(
            "each window must have at least one token of a prompt and one to score after it; got "
            f"shape {tuple(windows.shape)} with a continuation of {continuation}; take longer "
            "windows or a shorter continuation"
        )
    for addon in candidates.values():
        addon.check_base(model)
    tell = on_progress or (lambda _: None)
    bench = _Bench(model, anatomy(model), windows, windows.shape[1] - continuation, lengths, batch)
    tell(PLAIN)
    base = continuation_loss(model, windows, bench.prompt, batch=batch)
    results = [bench.result(PLAIN, None, summary(base))]
    for name, addon in candidates.items():
        tell(name)
        results.append(bench.measure(name, addon, base))
    if speed:
        tell("speed")
        addons: dict[str, AddOnLike | None] = {PLAIN: None, **candidates}
        timing = SpeedSettings(history=bench.prompt, decode_tokens=1, repeats=repeats)
        speeds = measure_speed(model, addons, windows, timing)
        results = [replace(result, speed=speeds[result.name]) for result in results]
    dtype = str(model.dtype).removeprefix("torch.")
    return PromptEvaluation(tuple(results), len(windows), bench.prompt, continuation, dtype)


@dataclass(frozen=True)
class _Bench:
    """What all candidates are measured on."""

    model: Any
    shape: Anatomy
    windows: Tensor
    prompt: int
    lengths: tuple[int, ...]
    batch: int

    def measure(self, name: str, addon: AddOnLike, base: Tensor) -> PromptResult:
        """One candidate's figures but for its speed; base: the plain model's losses."""
        plan = addon.plan
        chunk = decoding_chunk(plan)
        with attach(self.model, addon) as attachment:
            losses = continuation_loss(
                self.model, self.windows, self.prompt, batch=self.batch, chunk=chunk
            )
        resident = layers_by_residency(attachment)
        return self.result(name, plan, summary(losses, base), resident)

    def result(
        self,
        name: str,
        plan: Plan | None,
        figures: dict[str, Any],
        resident: Mapping[str, int] | None = None,
    ) -> PromptResult:
        """The figures of `continuation.summary` with what follows from the plan."""
        found = {**figures, "losses": tuple(figures["losses"])}
        if plan is None:
            return PromptResult(
                name, None, memory=memory_at(None, self.shape, self.lengths), **found
            )
        held = dict(resident or {})
        return PromptResult(
            name,
            plan.to_dict(),
            memory=memory_at(as_picked(plan, held), self.shape, self.lengths),
            skipped_tokens=skipped_tokens(plan, self.prompt),
            operations_left=operations_left(plan, self.shape, self.prompt),
            resident=held,
            **found,
        )
