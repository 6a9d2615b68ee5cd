"""A small language with text and recall tasks, made from a seed.

It is what the tiny hybrid of `kvfold.models.tiny_hybrid` was trained on and is tested with: small
enough that eight thousand bytes of vocabulary say it all, and still with the two things that a
hybrid model divides among its layers. Sentences follow from the words just before them (the
recurrent layers' work), and facts must be found again hundreds of words later (the attention
layers' work). A document is sentences, facts, and questions about facts that came before:

| kind | stated as | asked as | answer |
|---|---|---|---|
| `value` | `note : anchor is violet .` | `question : anchor is` | `violet .` |
| `copy` | `list tango : oak wolf ... end .` | `question : list tango :` | `oak wolf ... end .` |
| `first` | `the door was first red .` | `question : the door was first` | `red .` |
| `last` | `the door was last blue .` | `question : the door was last` | `blue .` |

Between its first and its last colour a thing may have another: `the door was then green .`

No word means anything outside its sentence: nothing can be answered without the document.
"""

# ruff: noqa: SIM905 -- lists of words are read, and compared, as text

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

RecallKind = Literal["value", "copy", "first", "last"]
RECALL_KINDS: tuple[RecallKind, ...] = get_args(RecallKind)

NAMES = (
    "ada bruno carla dario elena felix greta hugo irene jonas kira leon mara nils olga pavel "
    "rosa sven tilda ugo vera wanda xenia yuri zoe anton berta clara"
).split()
JOBS = (
    "baker carpenter doctor farmer fisher gardener hunter judge miller painter pilot potter "
    "sailor singer smith tailor teacher weaver"
).split()
PLACES = (
    "market harbor garden forest valley castle bridge tower village meadow river station "
    "library kitchen workshop orchard mill beach"
).split()
KEYS = (
    "anchor basket candle drum engine feather glove hammer island jacket kettle ladder mirror "
    "needle orange pencil quilt ribbon saddle ticket umbrella violin wagon yarn zipper arrow "
    "bottle carpet dagger envelope fiddle goblet helmet ink jewel key lantern magnet notebook "
    "oar parcel quiver rope scarf thimble urn vase whistle axe bell coin dish"
).split()
VALUES = (
    "amber birch cobalt dusk ember flint granite hazel ivory jade kelp lilac marble nickel oak "
    "pearl quartz russet silver teal umber violet wheat zinc acorn bronze copper denim ebony "
    "fern gold honey indigo jasper khaki lemon mint navy olive plum rose sand topaz walnut "
    "wolf otter raven heron badger falcon lynx moth"
).split()
LABELS = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november "
    "oscar papa quebec romeo sierra tango uniform victor"
).split()
THINGS = (
    "door lamp sky flag lake roof sign leaf fire stone wall tent boat horse curtain window"
).split()
COLOURS = "red blue green yellow black white purple brown pink grey crimson azure".split()
VERBS = (
    "carried found painted dropped borrowed cleaned hid broke sold mended admired lifted "
    "measured traded washed followed counted polished opened buried"
).split()
ADJECTIVES = (
    "old new small heavy bright broken quiet warm cold clean dusty round narrow wide soft hard"
).split()
GOODS = (
    "bread barrel blanket book boots box brush bucket chair clock cloth crate flute hat "
    "jug knife map net pan pipe plate pot sack shovel spoon table tool wheel"
).split()
ADVERBS = "slowly gladly again alone today quickly often later together carefully".split()
GLUE = (
    ". , : the a and then of in at to with for was is not but because while who he she it they "
    "his her went came stayed said that note question list end first last before after"
).split()
SPECIAL = ("<pad>", "<doc>")

VOCABULARY: tuple[str, ...] = tuple(
    dict.fromkeys(
        [
            *SPECIAL,
            *GLUE,
            *NAMES,
            *JOBS,
            *PLACES,
            *KEYS,
            *VALUES,
            *LABELS,
            *THINGS,
            *COLOURS,
            *VERBS,
            *ADJECTIVES,
            *GOODS,
            *ADVERBS,
        ]
    )
)
"""Every word, in the order of its token id: 0 pads, 1 begins a document."""

COPY_LENGTH = 6
"""Words of a list to be copied."""
MOST_EVENTS = 3
"""Colours that a thing takes in one document."""
ENDS_EARLY = 0.6
"""The chance that the second colour is the last."""
QUESTION_SHARES: dict[RecallKind, int] = {"value": 3, "copy": 1, "first": 2, "last": 2}
"""How often each kind is asked in training; a copy has six words to learn from, the others one."""
LONGEST_STATEMENT = 16
"""No statement has more words."""
MOST_ATTEMPTS = 1000


class Answer(NamedTuple):
    """Where the answer to a question stands, [start, stop), and where the fact has its words.

    Word `start + i` of the document is word `source + i` again.
    """

    start: int
    stop: int
    source: int


@dataclass(frozen=True)
class RecallPrompt:
    """One question about a document, and where its answer stands.

    words: the document, `<doc>` first and the question last. answer: the words to generate. fact:
    the span [start, stop) of positions in `words` that states the answer.
    """

    kind: RecallKind
    words: tuple[str, ...]
    answer: tuple[str, ...]
    fact: tuple[int, int]


@dataclass
class _Fact:
    kind: Literal["value", "copy", "event"]
    key: str
    values: list[str]
    spans: list[tuple[int, int]] = field(default_factory=list)


class Document:
    """Words, one after another, and the facts among them (see the module's table).

    seed: makes the document. All randomness comes from it.
    """

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)  # noqa: S311  made up text, no secret
        self.words: list[str] = ["<doc>"]
        self.answers: list[Answer] = []
        self._facts: dict[tuple[str, str], _Fact] = {}
        self._cast = self.random.sample(NAMES, 4)
        self._home = {name: self.random.choice(PLACES) for name in self._cast}
        self._work = {name: self.random.choice(JOBS) for name in self._cast}
        self._tool = {name: self.random.choice(GOODS) for name in self._cast}
        self._things: list[str] = []
        self._finished: set[str] = set()

    def __len__(self) -> int:
        return len(self.words)

    def sentence(self) -> None:
        """A sentence of the tale: who did what to which thing, where."""
        r = self.random
        name, other = r.sample(self._cast, 2)
        verb = r.choice(VERBS)
        thing = f"{_likely(r, verb, ADJECTIVES)} {_likely(r, verb, GOODS)}"
        self._say(
            r.choice(
                (
                    f"{name} the {self._work[name]} {verb} the {thing} .",
                    f"{name} went to the {self._home[name]} with the {self._tool[name]} .",
                    (
                        f"in the {self._home[name]} , {name} {verb} a {thing} "
                        f"{_likely(r, verb, ADVERBS)} ."
                    ),
                    f"{name} said that {other} {verb} the {thing} of {name} .",
                    f"{other} stayed at the {self._home[other]} because {name} {verb} it .",
                    f"{name} came with the {self._tool[name]} and {verb} the {thing} .",
                )
            )
        )

    def value(self) -> bool:
        """A fact `note : key is value .`; False if every key is taken."""
        key = self._unused("value", KEYS)
        if key is None:
            return False
        value = self.random.choice(VALUES)
        self._state("value", key, [value], f"note : {key} is {value} .")
        return True

    def copy(self) -> bool:
        """A list to be copied; False if every label is taken."""
        label = self._unused("copy", LABELS)
        if label is None:
            return False
        items = self.random.sample(VALUES, COPY_LENGTH)
        self._state("copy", label, items, f"list {label} : {' '.join(items)} end .")
        return True

    def event(self) -> bool:
        """A thing takes a colour that it has not had; False if all things have had their last."""
        r = self.random
        again = [t for t in self._things if t not in self._finished]
        fresh = [t for t in THINGS if t not in self._things]
        if not again and not fresh:
            return False
        if again and (not fresh or r.random() < 0.6):
            thing = r.choice(again)
            had = self._facts["event", thing].values
        else:
            thing, had = r.choice(fresh), []
            self._things.append(thing)
        colour = r.choice([colour for colour in COLOURS if colour not in had])
        order = "then" if had else "first"
        if had and (len(had) + 1 == MOST_EVENTS or r.random() < ENDS_EARLY):
            order = "last"
            self._finished.add(thing)
        self._state("event", thing, [colour], f"the {thing} was {order} {colour} .")
        return True

    def facts(self, kind: RecallKind) -> list[str]:
        """Keys that can be asked about with a question of this kind."""
        stated = _STATED[kind]
        return [
            fact.key
            for fact in self._facts.values()
            if fact.kind == stated and (kind != "last" or fact.key in self._finished)
        ]

    def ask(self, kind: RecallKind, key: str) -> tuple[str, tuple[str, ...], tuple[int, int]]:
        """The question, its answer, and the span of words that states it."""
        fact = self._facts[_STATED[kind], key]
        if kind == "value":
            return f"question : {key} is", (fact.values[0], "."), fact.spans[0]
        if kind == "copy":
            return f"question : list {key} :", (*fact.values, "end", "."), fact.spans[0]
        which = 0 if kind == "first" else -1
        return f"question : the {key} was {kind}", (fact.values[which], "."), fact.spans[which]

    def question(self, kind: RecallKind, key: str) -> None:
        """A question and its answer, as part of the document."""
        question, answer, (_, stop) = self.ask(kind, key)
        self._say(question)
        start = len(self.words)
        self.words.extend(answer)
        self.answers.append(Answer(start, len(self.words), stop - len(answer)))

    def _unused(self, kind: str, keys: list[str]) -> str | None:
        left = [key for key in keys if (kind, key) not in self._facts]
        return self.random.choice(left) if left else None

    def _state(
        self, kind: Literal["value", "copy", "event"], key: str, values: list[str], words: str
    ) -> None:
        fact = self._facts.setdefault((kind, key), _Fact(kind, key, []))
        fact.values.extend(values)
        start = len(self.words)
        self._say(words)
        fact.spans.append((start, len(self.words)))

    def _say(self, words: str) -> None:
        self.words.extend(words.split())


_STATED: dict[RecallKind, Literal["value", "copy", "event"]] = {
    "value": "value",
    "copy": "copy",
    "first": "event",
    "last": "event",
}


def training_document(seed: int | str, length: int) -> tuple[list[str], list[Answer]]:
    """A document of `length` words with questions throughout, and its answers."""
    document = Document(seed)
    r = document.random
    tale = r.choice((0.1, 0.3, 0.6))
    while len(document) < length:
        if r.random() < tale:
            document.sentence()
        elif r.random() < 0.5:
            _state_any(document)
        else:
            kind = r.choices(RECALL_KINDS, [QUESTION_SHARES[kind] for kind in RECALL_KINDS])[0]
            keys = document.facts(kind)
            if keys:
                document.question(kind, r.choice(keys))
            else:
                _state_any(document)
    answers = [a._replace(stop=min(a.stop, length)) for a in document.answers if a.start < length]
    return document.words[:length], answers


def text_document(seed: int | str, length: int) -> list[str]:
    """A tale of `length` words without facts or questions."""
    document = Document(seed)
    while len(document) < length:
        document.sentence()
    return document.words[:length]


def recall_prompt(
    seed: int | str,
    kind: RecallKind,
    length: int,
    *,
    fact_within: tuple[int, int] | None = None,
    facts: float = 0.4,
) -> RecallPrompt:
    """One document of exactly `length` words that ends in a question of this kind.

    fact_within: where the asked fact has to stand, as a span of positions [start, stop) in the
    prompt; anywhere by default. facts: the share of statements that are facts, the rest tale.
    Raises `ValueError` if no attempt at a document has such a fact there.
    """
    start, stop = fact_within or (0, length)
    told = length - QUESTION_WORDS[kind]
    for attempt in range(MOST_ATTEMPTS):
        document = Document(f"{seed}/{kind}/{attempt}")
        r = document.random
        while len(document) + LONGEST_STATEMENT <= told:
            if r.random() < facts:
                _state_any(document)
            else:
                document.sentence()
        while len(document) < told:
            document.sentence()
        del document.words[told:]
        asked = [(key, *document.ask(kind, key)) for key in document.facts(kind)]
        fitting = [a for a in asked if start <= a[3][0] and a[3][1] <= stop]
        if fitting:
            _, question, answer, span = r.choice(fitting)
            return RecallPrompt(kind, (*document.words, *question.split()), answer, span)
    raise ValueError(f"no fact of kind {kind} fits into {start} to {stop} of {length} words")


QUESTION_WORDS: dict[RecallKind, int] = {"value": 4, "copy": 5, "first": 6, "last": 6}
"""How many words at the end of a prompt are its question."""


def _state_any(document: Document) -> None:
    statement = document.random.choice((document.value, document.copy, document.event))
    if not statement():
        document.event()


def _likely(r: random.Random, word: str, choices: list[str]) -> str:
    """One of four choices that go with a word: the same four in every document."""
    own = random.Random(f"goes with {word}")  # noqa: S311
    return r.choice(own.sample(choices, 4))
