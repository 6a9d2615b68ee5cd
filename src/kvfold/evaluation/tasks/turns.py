"""The task `turns`: a conversation on one kept cache, turn after turn.

Each turn brings text with a fact in it, and ends in a question about a fact of an earlier turn.
What the model would say is taken from a copy of the cache; the conversation itself goes on with the
right answer, so that a wrong one spoils no later turn and all subjects read the same words. Facts
come further and further away, and are folded again and again as the turns go by.

`recalled`: of each question, whether the answer was right; also by turn, and by how many turns ago
the fact was told. `same_text`: whether the words after the
last question are those that come after the whole conversation fed at once: a cache that was built
in pieces must be worth as much as one that was not. Where a prompt's own queries see more than a
decode step would (`prefill_attention: exact`, `prefill: skip`), the two caches differ by what the
plan says, and this shows how much. `agreed_tokens`: the same as a length.

Every turn has equally many tokens. A tokenizer of the tiny language gets turns in that language.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvfold.errors import EvaluationError
from kvfold.evaluation.greedy import before_end, begins_with, end_tokens, read, speak
from kvfold.evaluation.tasks.files import data_file
from kvfold.evaluation.tasks.needle import BOOK, DIGITS, PLACES
from kvfold.evaluation.tasks.selection import SelectedItems, in_batches
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Item, Subject
from kvfold.evaluation.tasks.texts import (
    file_tokens,
    require_length,
    require_tokenizer,
    speaks_tiny_language,
    tiny_ids,
)
from kvfold.evaluation.tiny_language import Document

TURNS = 6
LENGTHS = (192,)
CONVERSATIONS = 8
ANSWER_TOKENS = 8
"""Room for an answer."""

NEW_TOKENS = 24
"""Compared after the last question."""


@dataclass(frozen=True)
class TurnsSettings:
    """lengths: tokens of a turn. conversations: of each length."""

    lengths: tuple[int, ...] = LENGTHS
    turns: int = TURNS
    conversations: int = CONVERSATIONS
    new_tokens: int = NEW_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `EvaluationError` unless an earlier turn can be asked about."""
        if not 2 <= self.turns <= len(PLACES):
            raise EvaluationError(
                f"a conversation must have 2 to {len(PLACES)} turns; got {self.turns}"
            )


@dataclass(frozen=True)
class Question:
    """The question that ends a turn. turn, of: where it is asked and where the fact was stated."""

    turn: int
    of: int
    answer: str


@dataclass(frozen=True)
class Conversation:
    """ids: (turns, tokens of a turn). The first turn has no question."""

    ids: list[list[int]]
    questions: tuple[Question, ...]


class TurnsTask(SelectedItems):
    """See the module."""

    name = "turns"
    not_for_peers = "kvpress compresses a cache once, after the first prompt, and no later turn"

    def __init__(
        self,
        chosen: TurnsSettings,
        conversations: Mapping[int, Sequence[Conversation]],
        source: Mapping[str, Any],
        of_all: TaskSettings,
    ) -> None:
        self.chosen = chosen
        every = [
            {
                "id": f"{length}/{number}",
                "length": length,
                "turns": made.ids,
                "questions": [asdict(question) for question in made.questions],
            }
            for length, some in conversations.items()
            for number, made in enumerate(some)
        ]
        super().__init__(every, {**asdict(chosen), "text": dict(source)}, of_all)

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        """What was said at each turn, and which was right; and whether both caches say the same."""

        def answer(alike: Sequence[Item]) -> list[Answer]:
            turns = torch.tensor([item["turns"] for item in alike])
            by_turn = _turn_by_turn(subject.model, turns, self.chosen.new_tokens)
            whole = speak(
                subject.model, *read(subject.model, turns.flatten(1)), self.chosen.new_tokens
            ).tolist()
            return [
                _answer(item, subject, [said[row] for said in by_turn], whole[row])
                for row, item in enumerate(alike)
            ]

        return in_batches(items, self.batch, lambda item: item["length"], answer)


def make(settings: TaskSettings) -> TurnsTask:
    """The task, its facts in the text of `gutenberg/1661.txt` or the book that is named."""
    require_tokenizer(settings)
    chosen = TurnsSettings(settings.lengths or LENGTHS, seed=settings.seed)
    lengths = sorted(set(chosen.lengths))
    made: dict[int, list[Conversation]] = {}
    if speaks_tiny_language(settings.tokenizer):
        source: dict[str, Any] = {"name": "documents of the tiny language"}
        for length in lengths:
            made[length] = [
                _tiny_conversation(
                    f"{chosen.seed} {length} {n}", chosen.turns, length, settings.tokenizer
                )
                for n in range(chosen.conversations)
            ]
        return TurnsTask(chosen, made, source, settings)
    book = data_file(settings, BOOK)
    hay = file_tokens(book, settings.tokenizer)
    for length in lengths:
        require_length(book, hay, chosen.turns * length)
        made[length] = [
            _conversation(
                f"{chosen.seed} {length} {n}", chosen.turns, length, hay, settings.tokenizer
            )
            for n in range(chosen.conversations)
        ]
    return TurnsTask(chosen, made, book.to_dict(), settings)


def _conversation(
    name: str, turns: int, length: int, hay: Sequence[int], tokenizer: Any
) -> Conversation:
    """Facts about places in a book's text, a place a turn."""
    draw = random.Random(f"turns {name}")  # noqa: S311  no secret

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return found

    places = draw.sample(PLACES, turns)
    numbers = [str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in places]
    start = draw.randrange(len(hay) - turns * length + 1)
    made: list[list[int]] = []
    questions: list[Question] = []
    answered: list[int] = []
    for turn, (place, number) in enumerate(zip(places, numbers, strict=True)):
        fact = ids(f"\nThe secret number of the {place} is {number}.\n")
        end: list[int] = []
        following: list[int] = []
        if turn:
            of = draw.randrange(turn)
            questions.append(Question(turn, of, numbers[of]))
            end = ids(f"\nThe secret number of the {places[of]} is")
            following = ids(f" {numbers[of]}.\n")
        room = length - len(answered) - len(fact) - len(end)
        _require_room(room, length)
        text = list(hay[start : start + room])
        start += room
        at = draw.randrange(room)
        made.append([*answered, *text[:at], *fact, *text[at:], *end])
        answered = following
    return Conversation(made, tuple(questions))


def _tiny_conversation(name: str, turns: int, length: int, tokenizer: Any) -> Conversation:
    """Facts of kind `value` in a tale."""
    document = Document(f"turns {name}")
    draw = document.random
    made: list[list[int]] = []
    questions: list[Question] = []
    told = 0
    for turn in range(turns):
        document.value()
        of, question = 0, ""
        answer: tuple[str, ...] = ()
        if turn:
            of = draw.randrange(turn)
            question, answer, _ = document.ask("value", document.facts("value")[of])
        stop = told + length - len(question.split())
        _require_room(stop - len(document), length)
        while len(document) < stop:
            document.sentence()
        del document.words[stop:]
        document.words.extend(question.split())
        made.append(tiny_ids(document.words[told:], tokenizer))
        told = len(document)
        if turn:
            questions.append(Question(turn, of, " ".join(answer)))
            document.words.extend(answer)
    return Conversation(made, tuple(questions))


def _require_room(room: int, length: int) -> None:
    if room < 1:
        raise EvaluationError(
            "a turn must have room for an answer, a fact and a question, and text beside them; "
            f"{length} tokens are {1 - room} too few; ask for longer turns"
        )


def _turn_by_turn(model: Any, turns: torch.Tensor, count: int) -> list[list[list[int]]]:
    """What is said at each turn but the first, by row; turns: (batch, turns, tokens).

    count: tokens after the last turn.
    """
    cache, said = None, []
    for number in range(turns.shape[1]):
        scores, cache = read(model, turns[:, number], cache)
        if number:
            room = count if number == turns.shape[1] - 1 else ANSWER_TOKENS
            said.append(speak(model, scores, copy.deepcopy(cache), room).tolist())
    return said


def _answer(item: Item, subject: Subject, by_turn: list[list[int]], whole: list[int]) -> Answer:
    ends = end_tokens(subject.model)

    def text(tokens: list[int]) -> str:
        cut = before_end(tokens, ends)
        return str(subject.tokenizer.decode(cut, skip_special_tokens=True))

    questions = [
        {**question, "text": text(said), "right": begins_with(text(said), question["answer"])}
        for question, said in zip(item["questions"], by_turn, strict=True)
    ]
    last = by_turn[-1]
    agreed = agreed_tokens(last, whole)
    return Answer(
        item["id"],
        {"length": item["length"], "questions": questions, "text_at_once": text(whole)},
        {
            "recalled": [question["right"] for question in questions],
            "same_text": agreed == len(last),
            "agreed_tokens": float(agreed),
            **_by_turn(questions),
        },
    )


def _by_turn(questions: Sequence[Mapping[str, Any]]) -> dict[str, list[bool]]:
    """Which were right at each turn, and of facts so many turns ago, of which there may be none."""
    turns = range(1, len(questions) + 1)
    named = {f"recalled/turn {turn}": [q for q in questions if q["turn"] == turn] for turn in turns}
    named |= {
        f"recalled/{ago} turns ago": [q for q in questions if q["turn"] - q["of"] == ago]
        for ago in turns
    }
    return {name: [bool(q["right"]) for q in some] for name, some in named.items()}


def agreed_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common before the first that differs."""
    pairs = zip(one, other, strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(one))
