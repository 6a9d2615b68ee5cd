"""One evaluation: the plain model first, then every candidate, on the same tokens.

The plain model's final hidden states are computed once and kept (tokens * hidden_size values), so
each candidate costs one folded pass. The run with the history dropped is made once for each set of
anchors, window and layers that some candidate uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.anatomy import Anatomy, anatomy
from kvfold.errors import EvaluationError
from kvfold.evaluation.chunks import Measure, logit_chunks
from kvfold.evaluation.fidelity import Fidelity
from kvfold.evaluation.memory import Memory, memory_at
from kvfold.evaluation.perplexity import CONVENTION, Perplexity
from kvfold.evaluation.recovery import history_recovery, without_history
from kvfold.evaluation.speed import Speed, SpeedSettings, measure_speed
from kvfold.plan import Plan
from kvfold.runtime.attach import AddOnLike, Attachment, attach
from kvfold.runtime.logits import plain_hidden_states

PLAIN = "no compression"
History = Literal["folded", "exact"]


@dataclass(frozen=True)
class Quality:
    """What the predictions are worth; losses and KL in nats a token.

    recovery and dropped_perplexity are None for the plain model, and recovery also where the
    text's history is worth nothing.
    """

    loss: float
    perplexity: float
    kl: float
    top_1_agreement: float
    top_5_agreement: float
    dropped_perplexity: float | None = None
    recovery: float | None = None


@dataclass(frozen=True)
class Result:
    """All that was measured of one candidate; plan is None for the plain model.

    resident: how many layers are held in each way, as picked on attaching.
    """

    name: str
    plan: dict[str, Any] | None
    quality: Quality
    memory: tuple[Memory, ...]
    resident: dict[str, int] = field(default_factory=dict)
    speed: Speed | None = None


@dataclass(frozen=True)
class Evaluation:
    """Results, the plain model's first, and what they were measured on."""

    results: tuple[Result, ...]
    windows: int
    window: int
    history: History
    convention: str
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with what follows from every memory entry's bytes."""
        data = asdict(self)
        for made, result in zip(data["results"], self.results, strict=True):
            for entry, memory in zip(made["memory"], result.memory, strict=True):
                entry.update(memory.derived())
        return data


def evaluate(
    model: Any,
    candidates: Mapping[str, AddOnLike],
    tokens: Tensor,
    *,
    history: History = "folded",
    lengths: tuple[int, ...] = (1024, 4096, 16384),
    speed: bool = True,
    speed_settings: SpeedSettings | None = None,
    batch: int = 4,
    on_progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Measure every candidate against the plain model.

    tokens: (windows, window) int64. history: whether a candidate's history is made in its own
    folded pass, or from an exact pass of the plain model. lengths: token counts at which bytes are
    given. on_progress is told what is being measured next. Raises `EvaluationError` where a figure
    is not finite, naming the candidate, and `AddOnError` for an add-on of another model.
    """
    check_names(candidates, lengths)
    _check_tokens(tokens)
    tell = on_progress or (lambda _: None)
    seen = anatomy(model)
    for addon in candidates.values():
        addon.check_base(model)
    tell(PLAIN)
    batches = [part.to(model.device) for part in torch.split(tokens, batch)]
    scorer = Scorer(model, batches, [plain_hidden_states(model, ids).cpu() for ids in batches])
    base = scorer.score(PLAIN, scorer.base)
    results = [Result(PLAIN, None, base, memory_at(None, seen, lengths))]
    dropped: dict[str, Quality] = {}
    for name, addon in candidates.items():
        tell(name)
        quality, resident = scorer.measure(name, addon, history)
        yardstick = _dropped(scorer, name, addon, seen, dropped, tell)
        results.append(
            Result(
                name=name,
                plan=addon.plan.to_dict(),
                quality=_with_recovery(quality, yardstick, base),
                memory=memory_at(as_picked(addon.plan, resident), seen, lengths),
                resident=resident,
            )
        )
    if speed:
        results = _with_speed(model, results, candidates, tokens, speed_settings, tell)
    return Evaluation(
        results=tuple(results),
        windows=tokens.shape[0],
        window=tokens.shape[1],
        history=history,
        convention=CONVENTION.format(windows=tokens.shape[0], window=tokens.shape[1]),
        dtype=str(model.dtype).removeprefix("torch."),
    )


class Scorer:
    """Scores final hidden states of a fixed set of windows against the plain model's.

    batches: (batch, seq) ids each. base: the plain model's final hidden states of each.
    """

    def __init__(self, model: Any, batches: list[Tensor], base: list[Tensor]) -> None:
        self.model = model
        self.batches = batches
        self.base = base

    def measure(
        self, name: str, addon: AddOnLike, history: History
    ) -> tuple[Quality, dict[str, int]]:
        """Quality with the add-on attached, and how many layers are resident in which way."""
        with attach(self.model, addon) as attachment:
            hidden = [attachment.hidden_states(ids, history=history).cpu() for ids in self.batches]
        return self.score(name, hidden), layers_by_residency(attachment)

    def score(self, name: str, hidden: list[Tensor]) -> Quality:
        """Every measure over all batches; raises `EvaluationError` if one is not finite."""
        perplexity, fidelity = Perplexity(), Fidelity()
        measures: tuple[Measure, ...] = (perplexity, fidelity)
        device = self.batches[0].device
        for ids, measured, base in zip(self.batches, hidden, self.base, strict=True):
            same = measured is base
            base_here = None if same else base.to(device)
            for chunk in logit_chunks(self.model, ids, measured.to(device), base_here):
                for measure in measures:
                    measure.update(chunk)
        figures = {**perplexity.result(), **fidelity.result()}
        wrong = [key for key, value in figures.items() if not math.isfinite(value)]
        if wrong:
            raise EvaluationError(
                f"every figure must be finite; {name!r} gave "
                + ", ".join(f"{key}={figures[key]}" for key in wrong)
                + "; its activations overflow: fit it again on more text, or load the model in "
                "float32 or bfloat16"
            )
        return Quality(**figures)


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() != 2 or tokens.shape[0] == 0 or tokens.shape[1] < 2:
        raise EvaluationError(
            "tokens must be (windows, window) with at least one window of two tokens; got shape "
            f"{tuple(tokens.shape)}"
        )


def check_names(candidates: Mapping[str, AddOnLike], lengths: tuple[int, ...]) -> None:
    """Raise `EvaluationError` if a candidate is called as the plain model is, or a length is 0."""
    if PLAIN in candidates:
        raise EvaluationError(
            f"the name {PLAIN!r} belongs to the plain model; give the candidate another"
        )
    if any(length < 1 for length in lengths):
        raise EvaluationError(f"lengths must be at least 1 token; got {list(lengths)}")


def check_seed(seed: int) -> None:
    """Raise `EvaluationError` for a seed that torch's generators can't take."""
    if not -(2**63) <= seed < 2**63:
        raise EvaluationError(f"a seed must be a whole number of 64 bits; got {seed}")


def layers_by_residency(attachment: Attachment) -> dict[str, int]:
    """How many layers are held in each way, as picked on attaching."""
    ways = list(attachment.resident.values())
    return {way: ways.count(way) for way in sorted(set(ways))}


def as_picked(plan: Plan, resident: Mapping[str, int]) -> Plan:
    """The plan with what `auto` picked for want of memory, which a prediction can't know."""
    return plan.replace(resident="shared") if set(resident) == {"shared"} else plan


def _dropped(
    scorer: Scorer,
    name: str,
    addon: AddOnLike,
    seen: Anatomy,
    known: dict[str, Quality],
    tell: Callable[[str], None],
) -> Quality:
    yardstick = without_history(addon, seen)
    key = yardstick.plan.to_json()
    if key not in known:
        tell(f"{name}, history dropped")
        known[key], _ = scorer.measure(f"{name}, history dropped", yardstick, "folded")
    return known[key]


def _with_recovery(quality: Quality, dropped: Quality, base: Quality) -> Quality:
    return replace(
        quality,
        dropped_perplexity=dropped.perplexity,
        recovery=history_recovery(dropped.loss, quality.loss, base.loss),
    )


def _with_speed(
    model: Any,
    results: list[Result],
    candidates: Mapping[str, AddOnLike],
    tokens: Tensor,
    settings: SpeedSettings | None,
    tell: Callable[[str], None],
) -> list[Result]:
    tell("speed")
    addons: dict[str, AddOnLike | None] = {PLAIN: None, **candidates}
    speeds = measure_speed(model, addons, tokens, settings)
    return [replace(result, speed=speeds[result.name]) for result in results]
