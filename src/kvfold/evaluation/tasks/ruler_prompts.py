"""Prompts after RULER (Hsieh et al. 2024, arXiv:2404.06654), made of word lists.

Written from the paper's description of its tasks; the sentences are our own. Every prompt has
exactly as many tokens as asked for: filler is added to that number, and its last sentence cut.

| kind | in the filler | asked for |
|---|---|---|
| `niah_single` | one number of one key | the number |
| `niah_multikey` | a number each of four keys | the number of one of them |
| `niah_multivalue` | four numbers of one key | all four |
| `variable_tracking` | a variable set to a number, four more set to one another | all five |
| `common_words` | a list with ten words far more often than all others | the ten |
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks.files import DataFile, lines_of

NEEDLES = 4
"""Keys, or values, where there is more than one."""

HOPS = 4
COMMON = 10
COMMON_AT = (30, 4096)
"""How often each common word comes in a list of so many tokens; in proportion in others."""

RARER = 10
"""How many times rarer any other word is, where it can be."""

DIGITS = 7
SPARE_TOKENS = 16
"""Room for other words around the answer."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the strings that a right output has in it; question: its last tokens."""

    kind: str
    ids: list[int]
    answers: tuple[str, ...]
    new_tokens: int
    question: int


@dataclass(frozen=True)
class WordLists:
    """Plain lower-case words."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]


@dataclass(frozen=True)
class _Frame:
    """The text around the filler, and sentences in it, in their order."""

    head: str
    inside: tuple[str, ...]
    tail: str
    answers: tuple[str, ...]


LEAST_WORDS = 4 * COMMON


def word_list(file: DataFile) -> tuple[str, ...]:
    """The plain words of a list of one a line; raises `EvaluationError` for too few of them."""
    words = dict.fromkeys(line.strip() for _, line in lines_of(file))
    plain = [w for w in words if w.isascii() and w.isalpha() and w.islower() and 3 <= len(w) <= 9]
    if len(plain) < LEAST_WORDS:
        raise EvaluationError(
            f"a word list must have at least {LEAST_WORDS} different words of 3 to 9 letters; "
            f"{file.path} has {len(plain)}"
        )
    return tuple(plain)


def ruler_prompt(kind: str, name: str, length: int, words: WordLists, tokenizer: Any) -> Prompt:
    """One prompt of `length` tokens. name: makes it, as a seed does.

    Raises `EvaluationError` for a length without room for what is asked.
    """
    draw = random.Random(f"{kind} {name}")  # noqa: S311  no secret
    if kind == "common_words":
        frame = _common_words(draw, length, words)
        filler = _other_words(draw, length, words, set(frame.answers))
    else:
        frame = FRAMES[kind](draw, words)
        filler = _sentences(draw, words)
    ids = _filled(frame, filler, draw, length, tokenizer, kind)
    room = len(_ids(tokenizer, ", ".join(frame.answers))) + SPARE_TOKENS
    return Prompt(kind, ids, frame.answers, room, len(_ids(tokenizer, frame.tail)))


def share_said(text: str, answers: Sequence[str]) -> float:
    """The share of strings that a text has in it, whatever their case: RULER's score."""
    heard = text.lower()
    return sum(answer.lower() in heard for answer in answers) / len(answers)


def _keys(draw: random.Random, words: WordLists, count: int) -> list[str]:
    pairs = zip(draw.sample(words.adjectives, count), draw.sample(words.nouns, count), strict=True)
    return [f"{adjective} {noun}" for adjective, noun in pairs]


def _numbers(draw: random.Random, count: int) -> list[str]:
    low = 10 ** (DIGITS - 1)
    return [str(number) for number in draw.sample(range(low, 10 * low), count)]


NIAH_HEAD = "Special numbers are hidden in this text. Remember them for the question at its end.\n"


def _needle(key: str, number: str) -> str:
    return f" The special number of the {key} is {number}."


def _niah(keys: int) -> Callable[[random.Random, WordLists], _Frame]:
    def frame(draw: random.Random, words: WordLists) -> _Frame:
        named, numbers = _keys(draw, words, keys), _numbers(draw, keys)
        inside = tuple(_needle(*pair) for pair in zip(named, numbers, strict=True))
        asked = draw.randrange(keys)
        tail = (
            f"\nQuestion: What is the special number of the {named[asked]}?"
            f"\nAnswer: The special number of the {named[asked]} is"
        )
        return _Frame(NIAH_HEAD, inside, tail, (numbers[asked],))

    return frame


def _niah_multivalue(draw: random.Random, words: WordLists) -> _Frame:
    (key,), numbers = _keys(draw, words, 1), _numbers(draw, NEEDLES)
    tail = (
        f"\nQuestion: What are all {NEEDLES} special numbers of the {key}?"
        f"\nAnswer: The special numbers of the {key} are"
    )
    return _Frame(NIAH_HEAD, tuple(_needle(key, n) for n in numbers), tail, tuple(numbers))


def _variable_tracking(draw: random.Random, _: WordLists) -> _Frame:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(draw.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    (value,) = _numbers(draw, 1)
    chain = [f" VAR {to} = VAR {of}." for of, to in pairwise(names)]
    head = (
        "Variables are set in this text. Remember which has which value.\n"
        "Example: VAR QZK = 31. VAR RTW = VAR QZK. The variables with the value 31 are VAR QZK, "
        "VAR RTW.\n"
    )
    tail = (
        f"\nQuestion: Which {HOPS + 1} variables have the value {value}?"
        f"\nAnswer: The variables with the value {value} are VAR"
    )
    return _Frame(head, (f" VAR {names[0]} = {value}.", *chain), tail, tuple(names))


FRAMES = MappingProxyType(
    {
        "niah_single": _niah(1),
        "niah_multikey": _niah(NEEDLES),
        "niah_multivalue": _niah_multivalue,
        "variable_tracking": _variable_tracking,
    }
)
KINDS = (*FRAMES, "common_words")


def _times(length: int) -> tuple[int, int]:
    """How often a common word and any other one come in a list of so many tokens."""
    most, at = COMMON_AT
    common = max(4, round(most * length / at))
    return common, max(1, common // RARER)


def _common_words(draw: random.Random, length: int, words: WordLists) -> _Frame:
    common = draw.sample(words.nouns, COMMON)
    inside = [f" {word}," for word in common for _ in range(_times(length)[0])]
    draw.shuffle(inside)
    head = f"In this list of words {COMMON} come far more often than all others:"
    tail = (
        f"\nQuestion: Which {COMMON} words are the most common in the list?"
        f"\nAnswer: The {COMMON} most common words in the list are"
    )
    return _Frame(head, tuple(inside), tail, tuple(common))


def _other_words(
    draw: random.Random, length: int, words: WordLists, common: set[str]
) -> Iterator[str]:
    """The other words of a list, each as often as it may come, in a drawn order."""
    times = _times(length)[1]
    others = [w for w in (*words.nouns, *words.adjectives, *words.verbs) if w not in common]
    others = list(dict.fromkeys(others))
    draw.shuffle(others)
    block = 64
    for start in range(0, len(others), block):
        part = others[start : start + block] * times
        draw.shuffle(part)
        yield from (f" {word}," for word in part)


def _sentences(draw: random.Random, words: WordLists) -> Iterator[str]:
    while True:
        first, second = _keys(draw, words, 2)
        yield f" The {first} can {draw.choice(words.verbs)} the {second}."


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def _filled(
    frame: _Frame,
    filler: Iterator[str],
    draw: random.Random,
    length: int,
    tokenizer: Any,
    kind: str,
) -> list[int]:
    """Head, filler with the frame's sentences at drawn places in their order, and tail."""
    head, tail = _ids(tokenizer, frame.head), _ids(tokenizer, frame.tail)
    inside = [_ids(tokenizer, text) for text in frame.inside]
    room = length - len(head) - len(tail) - sum(map(len, inside))
    if room < 1:
        raise EvaluationError(
            f"a prompt must have room for what is asked; {kind} needs more than {length - room} "
            f"tokens; got a length of {length}; ask for longer ones"
        )
    parts: list[list[int]] = []
    while room > 0:
        text = next(filler, None)
        if text is None:
            raise EvaluationError(
                f"word lists must be long enough for {kind} in {length} tokens; they end "
                f"{room} tokens before; name longer lists or a shorter length"
            )
        parts.append(_ids(tokenizer, text)[:room])
        room -= len(parts[-1])
    # Nothing follows the last part, which may be cut.
    places = sorted(draw.randrange(len(parts)) for _ in inside)
    for moved, (place, ids) in enumerate(zip(places, inside, strict=True)):
        parts.insert(place + moved, ids)
    return [token for part in (head, *parts, tail) for token in part]
