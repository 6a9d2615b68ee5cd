"""A recipe: all that decides what an add-on becomes, in one file.

Model, plan, texts, rows and the stages of its training, in order. It is data only: validated,
frozen, written and read as YAML or JSON, like the plan in it. `kvfold.fitting.stages` runs it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    Field,
    StrictInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from kvfold.anatomy import Anatomy
from kvfold.errors import KvfoldError, RecipeError
from kvfold.fitting.sizes import parse_bytes
from kvfold.fitting.stage_table import STAGES, StageKind
from kvfold.fitting.training_text import TextPart
from kvfold.models import own_name
from kvfold.plan import Plan, explain
from kvfold.plan_entries import Count, Frozen
from kvfold.presets import PRESETS, preset

DATA_VARIABLE = "${DATA}"
"""At the beginning of a text's source: the folder of public data, wherever it is."""

LONGEST_NAME = 120


@dataclasses.dataclass(frozen=True)
class StageEntry:
    """One stage of a recipe. name: of `STAGES`. settings: an instance of its settings class."""

    name: str
    settings: Any

    @property
    def kind(self) -> StageKind:
        """Its line in the table."""
        return STAGES[self.name]

    def to_dict(self) -> dict[str, Any]:
        """As in the file: `stage`, and the settings beside it."""
        return {"stage": self.name, **_plain(dataclasses.asdict(self.settings))}


MOST_TOKENS = 10**12


class SelfText(Frozen):
    """How the text of the source `self` is sampled: see `kvfold.fitting.self_text`."""

    temperature: float = 1.0
    top_p: float | None = None
    prompts: tuple[str, ...] | None = None
    batch: Annotated[StrictInt, Field(ge=1)] = 8


class Recipe(Frozen):
    """All that decides what an add-on becomes.

    name: what the add-on is called. model: `default` (the embedded SmolLM2), `tiny-hybrid`, a
    folder or a hub id. dtype, device: to load it in; found by themselves if None. plan: a preset's
    name; or a mapping of `preset` and keys of the plan that replace the preset's; or a whole plan.

    text: parts of the mixture, each of `source` (None for Python's documentation, `self`, a path,
    `hub:NAME`; `${DATA}/...` is in a folder that is named when the recipe is run), `weight` and
    `tokens`. seq: tokens of a row. held_out: tokens to measure on, or, below 1, their share of all
    `tokens` of the parts. seed: of all draws. self_text: how `self` is sampled.

    stages: in order, each of `stage` (a name of `STAGES`) and that stage's settings.

    memory_limit: what the recipe must fit in, in bytes or as text such as 24GiB; a dry run holds it
    to that (`kvfold.fitting.predict`).
    """

    version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    model: Annotated[str, Field(min_length=1)] = "default"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    plan: str | dict[str, Any]
    text: tuple[TextPart, ...] = (TextPart(),)
    seq: Annotated[Count, Field(ge=2)] = 512
    held_out: Annotated[int | float, Field(gt=0)] = 8192
    seed: StrictInt = 0
    self_text: SelfText = SelfText()
    stages: Annotated[tuple[StageEntry, ...], Field(min_length=1)]
    memory_limit: int | str | None = None

    @field_validator("plan")
    @classmethod
    def _plan_can_be(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        """What can be known of a plan before the model is."""
        keys = {"preset": value} if isinstance(value, str) else dict(value)
        name = keys.pop("preset", None)
        if name is not None and name not in PRESETS:
            raise ValueError(f"a preset is one of {', '.join(PRESETS)}; got {name!r}")
        with _as_value_error():
            made = Plan.from_dict(keys)
        return value if name is not None else made.to_dict()

    @field_validator("name")
    @classmethod
    def _name_can_be_read(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("a recipe's name must have more than blanks")
        return value

    @field_validator("text", mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        return tuple(
            item if isinstance(item, TextPart) else _from_mapping(TextPart, item, "text")
            for item in _entries(value, "text")
        )

    @field_validator("stages", mode="before")
    @classmethod
    def _read_stages(cls, value: Any) -> Any:
        return tuple(
            item if isinstance(item, StageEntry) else _stage(item)
            for item in _entries(value, "stages")
        )

    @field_validator("memory_limit")
    @classmethod
    def _limit_is_memory(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            with _as_value_error():
                parse_bytes(value)
        return value

    @field_validator("held_out")
    @classmethod
    def _held_out_is_a_share_or_a_count(cls, value: int | float) -> int | float:
        if value > MOST_TOKENS:
            raise ValueError(f"held_out must be at most {MOST_TOKENS:,} tokens")
        if value >= 1 and value != int(value):
            raise ValueError("held_out must be a share below 1, or a whole number of tokens")
        return value

    @model_validator(mode="after")
    def _rows_fit(self) -> Recipe:
        if self.held_out < 1 and any(part.tokens is None for part in self.text):
            raise ValueError(
                "held_out as a share needs `tokens` of every text; name them, or give held_out as "
                "a number of tokens"
            )
        if self.held_out_tokens < self.seq:
            raise ValueError(
                f"held_out must be at least a row of {self.seq} tokens; it comes to "
                f"{self.held_out_tokens}"
            )
        for part in self.text:
            if "${" in part.name and not _begins_with_data(part.name):
                raise ValueError(
                    f"a source may begin with {DATA_VARIABLE}/ and has no other variables; got "
                    f"{part.name!r}"
                )
        return self

    @property
    def held_out_tokens(self) -> int:
        """Tokens to measure on, at most."""
        if self.held_out >= 1:
            return int(self.held_out)
        return int(self.held_out * sum(part.tokens or 0 for part in self.text))

    @property
    def model_name(self) -> str:
        """The model as `kvfold.models.load` knows it."""
        return own_name(self.model) or self.model

    def plan_for(self, anatomy: Anatomy) -> Plan:
        """The plan for a model; raises `PlanError` if the model can't have it."""
        keys = {"preset": self.plan} if isinstance(self.plan, str) else dict(self.plan)
        name = keys.pop("preset", None)
        made = Plan.from_dict(keys) if name is None else preset(name, anatomy).replace(**keys)
        made.check(anatomy)
        return made

    def text_in(self, data: Path | None) -> tuple[TextPart, ...]:
        """The texts with `${DATA}` replaced by a folder; raises `RecipeError` where it is needed
        and not given."""
        return tuple(self._in(part, data) for part in self.text)

    def _in(self, part: TextPart, data: Path | None) -> TextPart:
        if not _begins_with_data(part.name):
            return part
        if data is None:
            raise RecipeError(
                f"the recipe {self.name!r} reads {part.name}, and no data folder was named; name "
                f"the one that {DATA_VARIABLE} stands for with --data FOLDER"
            )
        return dataclasses.replace(part, source=f"{data}{part.name[len(DATA_VARIABLE) :]}")

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, defaults included."""
        texts = [_plain(dataclasses.asdict(part)) for part in self.text]
        own = {"text": texts, "stages": [stage.to_dict() for stage in self.stages]}
        plain = self.model_dump(mode="json", exclude=set(own))
        return {key: own[key] if key in own else plain[key] for key in type(self).model_fields}

    def to_json(self) -> str:
        """The recipe as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_yaml(self) -> str:
        """The recipe as YAML text."""
        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        return text

    @classmethod
    def from_dict(cls, data: Any) -> Recipe:
        """Read a recipe from plain data; raises `RecipeError` that names the key at fault."""
        if not isinstance(data, dict):
            raise RecipeError(f"a recipe must be a mapping of keys; got {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise RecipeError(explain(error, "recipe")) from None
        except (TypeError, OverflowError) as error:  # a list for a name, an infinite count
            raise RecipeError(f"a recipe has a value that can't be: {error}") from None

    @classmethod
    def from_yaml(cls, text: str) -> Recipe:
        """Read a recipe from YAML or JSON text; raises `RecipeError`."""
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"a recipe must be valid YAML or JSON: {error}") from None
        return cls.from_dict(data)

    from_json = from_yaml

    @classmethod
    def from_file(cls, path: str | Path) -> Recipe:
        """Read a recipe from a file; raises `RecipeError` with its path."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"a recipe must be a YAML or JSON file; {path}: {error}") from None
        try:
            return cls.from_yaml(text)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from None


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Lets kvfold's own errors be gathered by pydantic, which knows at which key they arose."""
    try:
        yield
    except KvfoldError as error:
        raise ValueError(str(error)) from None


def _begins_with_data(source: str) -> bool:
    return source == DATA_VARIABLE or source.startswith(f"{DATA_VARIABLE}/")


def _entries(value: Any, name: str) -> Iterable[Any]:
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of entries")
    return value


def _stage(item: Any) -> StageEntry:
    keys = {"stage": item} if isinstance(item, str) else item
    if not isinstance(keys, dict) or "stage" not in keys:
        raise ValueError(f"a stage must be a name or a mapping with the key stage; got {item!r}")
    name = keys["stage"]
    if name not in STAGES:
        raise ValueError(f"a stage is one of {', '.join(STAGES)}; got {name!r}")
    rest = {key: value for key, value in keys.items() if key != "stage"}
    return StageEntry(name, _from_mapping(STAGES[name].settings, rest, f"stage {name}"))


def _from_mapping(made: type[Any], data: Any, what: str) -> Any:
    """A frozen dataclass from plain data, its fields the only keys; raises `ValueError`."""
    if not isinstance(data, dict):
        raise ValueError(f"a {what} must be a mapping of keys; got {data!r}")
    known = [field.name for field in dataclasses.fields(made)]
    unknown = [str(key) for key in data if key not in known]
    if unknown:
        raise ValueError(
            f"the {what} has the unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}; it "
            f"knows {', '.join(known)}"
        )
    try:
        return TypeAdapter(made).validate_python(data)
    except ValidationError as error:
        raise ValueError(explain(error, what)) from None
    except KvfoldError as error:
        raise ValueError(f"{what}: {error}") from None


def _plain(value: Any) -> Any:
    """As JSON has it: tuples as lists, paths as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
