"""What every task of the evaluation suite may be told when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TaskSettings:
    """data: folder of public data sets. fraction: share of a task's items, from its first on.

    limit: at most so many items. seed: of what is drawn at random. batch: items in one forward.
    lengths: token counts, for tasks that have a length. tokenizer: the model's, for tasks that
    measure out their prompts in tokens.
    """

    data: Path | None
    fraction: float = 1.0
    limit: int | None = None
    seed: int = 0
    batch: int = 8
    lengths: tuple[int, ...] = ()
    tokenizer: Any = None
