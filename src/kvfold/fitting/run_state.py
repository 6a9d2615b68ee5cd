"""How far a run of a recipe is, on disk: what an interrupted one goes on from.

What comes of a stage depends on what all stages share (model, plan, texts, rows, seed) and on the
stages up to it. So each stage has a key, made of itself and those before it, and what an earlier
run left of a stage is used exactly where the key is the same. A recipe whose third stage was
corrected keeps the first two, and ends where an unbroken run of the new recipe does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvfold.errors import FitError
from kvfold.evaluation.configuration import changed_keys
from kvfold.evaluation.runner import Quality
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.work_folder import STATE_FILE

START = "start"
"""The key of the weights before any stage."""
KEY_DIGITS = 12
NOT_SHARED = ("name", "memory_limit", "stages")
"""Keys of a recipe on which no weights depend, or only those of some stages."""


def stage_keys(recipe: Recipe) -> list[str]:
    """The key of each stage, fit to be a file's name: number, name and a digest."""
    keys, digest = [], hashlib.sha256()
    for number, entry in enumerate(recipe.stages, start=1):
        digest.update(json.dumps(entry.to_dict(), sort_keys=True).encode())
        keys.append(f"{number}-{entry.name}-{digest.hexdigest()[:KEY_DIGITS]}")
    return keys


def shared_by_stages(recipe: Recipe) -> dict[str, Any]:
    """What all stages of a recipe depend on, as plain data."""
    return {key: value for key, value in recipe.to_dict().items() if key not in NOT_SHARED}


@dataclass
class RunState:
    """What was measured so far.

    recipe: as plain data. dropped: quality with the history dropped. start: quality before any
    stage, None if it can't be measured. done: of each stage that is over, what the report says of
    it. keys: theirs. qualities: after each, None where it can't be measured.
    """

    recipe: Mapping[str, Any]
    dropped: Quality
    start: Quality | None
    done: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    qualities: list[Quality | None] = field(default_factory=list)

    @property
    def last_kept(self) -> int | None:
        """The number of the last stage that was kept."""
        return max((n for n, made in enumerate(self.done) if made["kept"]), default=None)

    @property
    def kept(self) -> str:
        """The key of the weights that are kept."""
        return START if self.last_kept is None else self.keys[self.last_kept]

    @property
    def quality(self) -> Quality | None:
        """Of the weights that are kept."""
        return self.start if self.last_kept is None else self.qualities[self.last_kept]

    def add(self, key: str, made: dict[str, Any], quality: Quality | None) -> None:
        """One more stage is over."""
        self.done.append(made)
        self.keys.append(key)
        self.qualities.append(quality)

    def go_on_with(self, recipe: Recipe) -> list[str]:
        """Keep what is of this recipe too; returns what is other, as `2-distil: rows: 2 -> 4`."""
        wanted = stage_keys(recipe)
        same = 0
        while same < min(len(self.keys), len(wanted)) and self.keys[same] == wanted[same]:
            same += 1
        for had in (self.done, self.keys, self.qualities):
            del had[same:]
        before, now = self.recipe["stages"], recipe.to_dict()["stages"]
        self.recipe = recipe.to_dict()
        return list(_differences(before, now))

    def to_dict(self, job: str) -> dict[str, Any]:
        """As plain data. job: a digest of what all stages depend on."""
        return {"job": job, **asdict(self)}

    @classmethod
    def read(cls, work: Path, job: str, recipe: Recipe) -> RunState | None:
        """What an earlier run left in a work folder, None for nothing.

        Raises `FitError` for a damaged file, or one of a run of which nothing can be kept.
        """
        path = work / STATE_FILE
        if not path.exists():
            return None
        remedy = f"name another folder, or delete {work} to start anew"
        try:
            saved = dict(json.loads(path.read_bytes()))
            found = saved.pop("job")
            state = cls(**saved)
            state.dropped, state.start = Quality(**saved["dropped"]), _quality(saved["start"])
            state.qualities = [_quality(one) for one in saved["qualities"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FitError(
                f"{path} must be what kvfold wrote of a run; it can't be read "
                f"({type(error).__name__}); {remedy}"
            ) from error
        if found != job:
            before = {key: x for key, x in state.recipe.items() if key not in NOT_SHARED}
            other = ", ".join(changed_keys(before, shared_by_stages(recipe)))
            raise FitError(
                f"the work folder {work} must be of this run; it was made with another recipe, "
                f"model or text{f' ({other})' if other else ''}; {remedy}"
            )
        return state


def _quality(data: Mapping[str, Any] | None) -> Quality | None:
    return None if data is None else Quality(**data)


def _differences(before: list[Any], now: list[Any]) -> list[str]:
    """What is other in each stage of two recipes, from the first one that differs."""
    told = []
    for number in range(max(len(before), len(now))):
        old = before[number] if number < len(before) else None
        new = now[number] if number < len(now) else None
        if old == new:
            continue
        if old is None or new is None or old["stage"] != new["stage"]:
            names = ["none" if one is None else one["stage"] for one in (old, new)]
            told.append(f"stage {number + 1}: {names[0]} -> {names[1]}")
        else:
            told += [f"stage {number + 1}, {new['stage']}: {x}" for x in changed_keys(old, new)]
    return told
