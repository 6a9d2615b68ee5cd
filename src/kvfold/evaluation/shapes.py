"""What the files of a run folder must hold, checked where they are read.

They are made by kvfold, but lie where people copy, edit and lose them. A fault that is found here
is told with the file and the place in it; found later it would be an error that names neither.
Only what is read back is asked for, and what else is there stays.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from kvfold.errors import EvaluationError

Interval = Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
"""Two ends; JSON has no tuples."""


class Shape(BaseModel):
    """Plain data as JSON has it: nothing is converted, `true` is no number and "1" is none."""

    model_config = ConfigDict(strict=True, extra="ignore")


class AnswerShape(Shape):
    """A line of a file of answers."""

    item: str
    said: dict[str, Any]
    scores: dict[str, Any] = Field(min_length=1)

    @field_validator("scores")
    @classmethod
    def _are_scores(cls, scores: dict[str, Any]) -> dict[str, Any]:
        for metric, score in scores.items():
            judged = isinstance(score, list) and all(isinstance(one, bool) for one in score)
            if not judged and not (isinstance(score, int | float) and math.isfinite(score)):
                raise ValueError(
                    f"{metric} must be true or false, a list of these, or a finite number"
                )
        return scores


class _Code(Shape):
    commit: str | None
    sources: str


class _Plan(Shape):
    anchors: int
    window: int


class _AddOn(Shape):
    plan: _Plan


class _Configuration(Shape):
    addon: _AddOn | None = None


class DescriptionShape(Shape):
    """What lies beside a file of answers. `code` is lacking where older releases wrote it."""

    subject: str
    digest: str
    items: PositiveInt
    configuration: _Configuration
    code: list[_Code] = []


class _Machine(Shape):
    cpu: str | None
    gpu: str | None
    cores: int | None


class _Config(Shape):
    fraction: FiniteFloat = 1.0


class RunShape(Shape):
    """`run.json`."""

    command: str
    commit: str | None
    machine: _Machine
    versions: dict[str, str | None]
    config: _Config
    model: dict[str, Any] = {}
    peers: dict[str, Any] = {}
    starts: list[dict[str, Any]] = []


class _Difference(Shape):
    value: FiniteFloat
    interval: Interval | None
    relative: FiniteFloat | None
    differing: int
    within_noise: bool
    verdict: str


class _Figure(Shape):
    kind: Literal["accuracy", "mean", "summary"]
    value: FiniteFloat
    interval: Interval | None
    better: str | None
    difference: _Difference | None


class _Task(Shape):
    items: int
    settings: dict[str, Any] = {}


class MetricsShape(Shape):
    """`metrics.json`."""

    seed: int
    plain: str
    subjects: list[str]
    tasks: dict[str, _Task]
    results: dict[str, dict[str, dict[str, _Figure]]]
    peers: list[str] = []
    unanswered: dict[str, dict[str, str]] = {}

    @model_validator(mode="after")
    def _fits(self) -> MetricsShape:
        wanting = {self.plain, *self.subjects} - (self.results.keys() & set(self.subjects))
        if wanting:
            raise ValueError(f"a subject must have results; {sorted(wanting)[0]!r} has none")
        for task in self.tasks:
            if task not in self.results[self.plain]:
                raise ValueError(f"{self.plain!r} must have figures of every task; none of {task}")
        return self


class _Memory(Shape):
    tokens: int
    components: dict[str, int]
    stored_bytes: int
    resident_bytes: int
    times_smaller: FiniteFloat
    resident_times_smaller: FiniteFloat


class _Speed(Shape):
    history: int
    prefill_seconds: FiniteFloat
    first_token_seconds: FiniteFloat | None
    decode_tokens_per_second: PositiveFloat
    peak_bytes: int | None


class _SubjectCost(Shape):
    addon_bytes: int
    memory: list[_Memory]
    speed: list[_Speed]


class CostShape(Shape):
    """`cost.json`. `code` is lacking where older releases wrote it."""

    digest: str
    machine: dict[str, Any]
    code: _Code | None = None
    settings: dict[str, Any]
    subjects: dict[str, _SubjectCost]

    @model_validator(mode="after")
    def _at_the_same_lengths(self) -> CostShape:
        lengths = {tuple(entry.tokens for entry in s.memory) for s in self.subjects.values()}
        if len(lengths) > 1:
            raise ValueError("all subjects must have bytes at the same lengths")
        return self


def check_shape(data: Any, shape: type[Shape], where: str | Path, remedy: str) -> None:
    """Raise `EvaluationError` for data that is not of a shape.

    where: the file, maybe with the line. remedy: what to do about it.
    """
    try:
        shape.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = " › ".join(str(part) for part in first["loc"])
        fault = str(first["msg"]).removeprefix("Value error, ")
        raise EvaluationError(
            f"{where} is not as kvfold writes it: {f'{place}: ' if place else ''}{fault}; {remedy}"
        ) from None
