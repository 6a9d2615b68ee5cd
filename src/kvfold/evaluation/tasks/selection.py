"""Which items of a task are asked, and which of them together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Item

Some = TypeVar("Some")
QUESTION = "question"
"""Key of an item: how many of its prompt's last tokens are the question, for peers."""


def selected(items: Sequence[Some], settings: TaskSettings) -> list[Some]:
    """The items that the settings ask for, spread evenly, in order.

    At least one: the limit's number, and of those the fraction. They are spread over the order of
    a grid: a small part of it may have no item of some depths or kinds.
    Raises `EvaluationError` for a fraction or a limit that leaves none.
    """
    if not 0 < settings.fraction <= 1:
        raise EvaluationError(
            f"fraction must be above 0 and at most 1; got {settings.fraction}; leave it out for all"
        )
    if settings.limit is not None and settings.limit < 1:
        raise EvaluationError(
            f"limit must be at least 1 item; got {settings.limit}; leave it out for no limit"
        )
    whole = len(items) if settings.limit is None else min(len(items), settings.limit)
    count = max(1, round(whole * settings.fraction))
    return [items[(2 * n + 1) * len(items) // (2 * count)] for n in range(count)]


def _check_room(items: Sequence[Item], positions: int | None) -> None:
    """Raise `EvaluationError` for a text that is longer than what the model can hold.

    positions: None where nothing is known of it. Figures of such texts would tell of the model's
    positions, and nothing of the cache.
    """
    for item in items:
        tokens = sum(map(len, item["turns"])) if "turns" in item else len(item.get("ids", ()))
        tokens = tokens or int(item.get("length", 0))
        if positions is not None and tokens > positions:
            raise EvaluationError(
                f"a text must fit into the {positions:,} positions that this model has; item "
                f"{item['id']} has {tokens:,} tokens; ask for shorter ones (--lengths)"
            )


def digest(items: Sequence[Item]) -> str:
    """SHA-256 of items as JSON: tells whether two runs asked the same, tokenizer included."""
    text = json.dumps([dict(item) for item in items], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class SelectedItems:
    """What kvfold's own tasks have in common: the items that are asked of all there are.

    every: all items, in order. described: what they are made of, for the settings.
    """

    not_for_peers: str | None = None
    parts: Sequence[tuple[str, ...]] = ()

    def __init__(
        self, every: Sequence[Item], described: Mapping[str, Any], of_all: TaskSettings
    ) -> None:
        self.described = described
        self.batch = self.chunk = of_all.batch
        self._items = selected(every, of_all)
        _check_room(self._items, of_all.positions)

    def settings(self) -> Mapping[str, Any]:
        """What the items are made of, how many they are, and a digest of what is asked."""
        asked = self.asked()
        return {**self.described, "items": len(asked), "items_sha256": digest(asked)}

    def asked(self) -> Sequence[Item]:
        """What the digest is of: the items, unless they only name what is asked.

        Where a prompt's question begins is no part of what is asked.
        """
        return [{k: v for k, v in item.items() if k != QUESTION} for item in self._items]

    def items(self) -> Sequence[Item]:
        """Every item, in the order of its grid."""
        return self._items

    def summary(self, answers: Sequence[Answer]) -> Mapping[str, float]:
        """Nothing beside averages of scores."""
        return {}


def in_batches(
    items: Sequence[Item],
    batch: int,
    like: Callable[[Item], Hashable],
    answers: Callable[[Sequence[Item]], Sequence[Answer]],
) -> list[Answer]:
    """Answers to items, in order, asked at most `batch` at a time of those that are alike.

    like: what must be the same of items that are asked at once, as their length, so that nothing
    is padded and an answer does not depend on the items beside it.
    """
    groups: dict[Hashable, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(like(item), []).append(number)
    found: dict[int, Answer] = {}
    for members in groups.values():
        for start in range(0, len(members), batch):
            numbers = members[start : start + batch]
            made = answers([items[number] for number in numbers])
            found.update(zip(numbers, made, strict=True))
    return [found[number] for number in range(len(items))]


def questions(items: Sequence[Item]) -> list[int]:
    """How many tokens at the end of each prompt are its question."""
    return [item[QUESTION] for item in items]


def mean(values: Sequence[Any]) -> float:
    """The mean of figures or of bools, of which there is at least one."""
    return sum(float(value) for value in values) / len(values)
