"""What a user chooses of every task alike; each task takes from it what concerns it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TaskSettings:
    """Settings of one run's tasks.

    data: folder of data sets, None for what comes with kvfold or from the hub. limit: items at
    most. fraction: of those that the limit leaves, above 0 and at most 1. seed: of everything
    drawn. batch: items in one forward pass. lengths: token counts, for tasks that have some; empty
    for their own. tokenizer: the model's, for tasks whose items are counted in tokens.
    answer_tokens: most new tokens of an answer, None for the task's own number; chat_template:
    whether prompts are put into the tokenizer's template; both only of tasks in
    `registry.ANSWERED_FREELY`. positions: the most tokens that the model can hold, None where
    nothing is known of it.
    """

    data: Path | None
    fraction: float = 1.0
    limit: int | None = None
    seed: int = 0
    batch: int = 8
    lengths: tuple[int, ...] = ()
    tokenizer: Any = None
    answer_tokens: int | None = None
    chat_template: bool = False
    positions: int | None = None
