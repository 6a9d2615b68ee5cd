"""A needle in a haystack: a sentence with a number somewhere in a long text, asked for at its end.

`... The secret number of the harbour is 48213. ...` stands at some depth of a book's text, and the
prompt ends in `The secret number of the harbour is`. Right if greedy decoding goes on with exactly
that number. Which place and which number follows from the seed, the length and the needle's own
number. The task `needle` asks for some at every depth and length of a grid.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import EvaluationError
from kvfold.evaluation.greedy import begins_with, says
from kvfold.evaluation.tasks.files import DataFile, data_file
from kvfold.evaluation.tasks.selection import (
    QUESTION,
    SelectedItems,
    in_batches,
    questions,
)
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Item, Subject
from kvfold.evaluation.tasks.texts import file_tokens, require_length, require_tokenizer

PLACES = ("harbour", "library", "orchard", "station", "tower", "bakery", "museum", "garden")
DIGITS = 5
NEW_TOKENS = 8
"""Room for the number in any tokenizer, with what follows it."""


@dataclass(frozen=True)
class Needle:
    """One prompt. ids: (tokens,); answer: the digits; depth: of the needle, from 0 to 1.

    question: how many of the last tokens are.
    """

    ids: Tensor
    answer: str
    depth: float
    question: int = 1


def needles(
    haystack: str, tokenizer: Any, *, length: int, depths: Sequence[float], each: int, seed: int = 0
) -> list[Needle]:
    """Prompts of `length` tokens: `each` at every depth.

    haystack: a text of at least `length` tokens. depths: where the needle stands among the
    haystack's tokens, 0 at the beginning, 1 right before the question. Raises `EvaluationError`
    for a text too short, no room beside needle and question, or depths outside 0 to 1.
    """
    hay = tokenizer(haystack, add_special_tokens=False, verbose=False).input_ids
    if len(hay) < length:
        raise EvaluationError(
            f"the haystack must have at least {length} tokens; it has {len(hay)}; give a longer "
            "text or a shorter length"
        )
    return _needles(hay, tokenizer, length, depths, each, seed=seed)


def _needles(
    hay: list[int],
    tokenizer: Any,
    length: int,
    depths: Sequence[float],
    each: int,
    *,
    seed: int | str,
) -> list[Needle]:
    if not all(0 <= depth <= 1 for depth in depths):
        raise EvaluationError(f"depths must be from 0 to 1; got {list(depths)}")
    drawn = [(depth, f"{seed} {depth} {number}") for depth in depths for number in range(each)]
    return [
        _needle(hay, tokenizer, length, depth, random.Random(name))  # noqa: S311  no secret
        for depth, name in drawn
    ]


def _needle(
    hay: list[int], tokenizer: Any, length: int, depth: float, draw: random.Random
) -> Needle:
    place, answer = draw.choice(PLACES), str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    fact = f"\nThe secret number of the {place} is {answer}.\n"
    question = f"\nThe secret number of the {place} is"
    inner, end = (tokenizer(t, add_special_tokens=False).input_ids for t in (fact, question))
    room = length - len(inner) - len(end)
    if room < 1:
        raise EvaluationError(
            f"a prompt must have room for needle and question, {len(inner) + len(end)} tokens; "
            f"got a length of {length}"
        )
    start = draw.randrange(len(hay) - room + 1)
    text, at = hay[start : start + room], round(depth * room)
    return Needle(torch.tensor([*text[:at], *inner, *text[at:], *end]), answer, depth, len(end))


def find_needles(
    model: Any, prompts: Sequence[Needle], tokenizer: Any, *, batch: int = 4
) -> list[bool]:
    """Whether each number came out right, in order.

    model: plain, or with an add-on attached. batch: prompts generated at once; all are equally
    long.
    """
    right: list[bool] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        told = says(model, [prompt.ids.tolist() for prompt in part], tokenizer, NEW_TOKENS)
        right += [begins_with(text, p.answer) for text, p in zip(told, part, strict=True)]
    return right


BOOK = "gutenberg/1661.txt"
LENGTHS = (512, 1024, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
EACH = 2


@dataclass(frozen=True)
class NeedleSettings:
    """lengths: tokens of a prompt. depths: from 0 to 1. each: needles at every depth and length."""

    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    each: int = EACH
    seed: int = 0


class NeedleTask(SelectedItems):
    """The grid of depths and lengths in one book; see the module."""

    name = "needle"
    parts = (("length",), ("depth",))

    def __init__(self, chosen: NeedleSettings, book: DataFile, of_all: TaskSettings) -> None:
        self.chosen = chosen
        hay = file_tokens(book, of_all.tokenizer)
        every = []
        for length in sorted(set(chosen.lengths)):
            require_length(book, hay, length)
            named = f"{chosen.seed} {length}"  # so that each length has needles of its own
            made = _needles(hay, of_all.tokenizer, length, chosen.depths, chosen.each, seed=named)
            every += [
                {
                    "id": f"{length}/{needle.depth}/{number % chosen.each}",
                    "length": length,
                    "depth": needle.depth,
                    "answer": needle.answer,
                    "ids": needle.ids.tolist(),
                    QUESTION: needle.question,
                }
                for number, needle in enumerate(made)
            ]
        described = {**asdict(chosen), "book": book.to_dict(), "new_tokens": NEW_TOKENS}
        super().__init__(every, described, of_all)

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        """What was said after each prompt, and whether it is the number; with depth and length."""

        def answer(alike: Sequence[Item]) -> list[Answer]:
            prompts = [item["ids"] for item in alike]
            model = subject.asked(questions(alike))
            told = says(model, prompts, subject.tokenizer, NEW_TOKENS)
            return [_answer(item, text) for item, text in zip(alike, told, strict=True)]

        return in_batches(items, self.batch, lambda item: item["length"], answer)


def make(settings: TaskSettings) -> NeedleTask:
    """The task, in `gutenberg/1661.txt` or the book that the settings name."""
    require_tokenizer(settings)
    chosen = NeedleSettings(settings.lengths or LENGTHS, seed=settings.seed)
    return NeedleTask(chosen, data_file(settings, BOOK), settings)


def _answer(item: Item, text: str) -> Answer:
    said = {name: item[name] for name in ("length", "depth", "answer")}
    return Answer(
        item["id"], {**said, "text": text}, {"accuracy": begins_with(text, item["answer"])}
    )
