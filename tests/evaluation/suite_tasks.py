"""Small tasks for tests of the suite: quick, seeded, and counting how often they are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvfold.evaluation.suite import Silent
from kvfold.evaluation.tasks.task import Answer, Item, Subject


class Told(Silent):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class NextTokenTask:
    """Which token comes next after random ones: what the real model says of real ids.

    Scores: `acc`, whether it is even; `parts`, its two lowest bits judged apart; `size`, a number
    that folding moves a little.
    """

    not_for_peers: str | None = None
    parts: Sequence[tuple[str, ...]] = ()

    def __init__(self, name: str = "even", items: int = 12, chunk: int = 3, **more: Any) -> None:
        self.name, self.chunk, self.count, self.more = name, chunk, items, more
        self.asked: list[tuple[str, str]] = []

    def settings(self) -> Mapping[str, Any]:
        return {"items": self.count, **self.more}

    def items(self) -> Sequence[Item]:
        return [{"id": f"{self.name}-{number}", "seed": number} for number in range(self.count)]

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        self.asked += [(subject.name, item["id"]) for item in items]
        draws = (torch.Generator().manual_seed(item["seed"]) for item in items)
        ids = torch.cat([torch.randint(3, 97, (1, 24), generator=draw) for draw in draws])
        with torch.no_grad():
            logits = subject.model(input_ids=ids).logits[:, -1].double()
        return [self._answer(item, row) for item, row in zip(items, logits, strict=True)]

    def _answer(self, item: Item, logits: torch.Tensor) -> Answer:
        token = int(logits.argmax())
        drawn = float(torch.rand(()))  # from the generator that the suite seeds for each chunk
        return Answer(
            item["id"],
            {"token": token, "length": 24, "depth": item["seed"] % 4 / 4, "drawn": drawn},
            {
                "acc": token % 2 == 0,
                "parts": [token % 2 == 0, token % 4 < 2],
                "size": float(logits.max()),
            },
        )

    def summary(self, answers: Sequence[Answer]) -> Mapping[str, float]:
        sizes = [float(answer.scores["size"]) for answer in answers]
        return {"ppl": 20 + sum(sizes) / len(sizes), "cosine/layer 0": 1.0, "cosine/layer 1": 0.5}


class StatedTask:
    """A task whose answers are given beforehand, by subject; no model is asked."""

    chunk = 4
    not_for_peers: str | None = None
    parts: Sequence[tuple[str, ...]] = ()

    def __init__(self, scores: Mapping[str, Sequence[Mapping[str, Any]]], name: str = "stated"):
        self.scores, self.name = scores, name

    def settings(self) -> Mapping[str, Any]:
        return {"n": len(self.items())}

    def items(self) -> Sequence[Item]:
        first = next(iter(self.scores.values()))
        return [{"id": str(number)} for number in range(len(first))]

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        return [Answer(i["id"], {}, self.scores[subject.name][int(i["id"])]) for i in items]

    def all_answers(self) -> dict[str, list[Answer]]:
        return {
            name: [Answer(str(number), {}, given) for number, given in enumerate(scores)]
            for name, scores in self.scores.items()
        }

    def summary(self, answers: Sequence[Answer]) -> Mapping[str, float]:
        return {}
