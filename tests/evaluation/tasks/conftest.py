"""A folder of data sets, a tokenizer of one token a character, and a model that says a script."""

from __future__ import annotations

import random
import string
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils import ModelOutput

from kvfold.evaluation.tasks import fidelity, needle, perplexity, ruler, turns
from kvfold.evaluation.tasks.settings import TaskSettings

MAKERS = {
    "perplexity": (perplexity.make, (48, 96)),
    "needle": (needle.make, (128, 160)),
    "ruler": (ruler.make, (720,)),
    "turns": (turns.make, (150,)),
    "fidelity": (fidelity.make, (80,)),
}
"""Each task's maker, with lengths that a character a token needs."""


class Characters:
    """One token a character: 1 to 95 for printable ones, 96 for the end of a line, 0 for others."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> Any:
        return _Ids([self._id(c) for c in text])

    def _id(self, character: str) -> int:
        if character == "\n":
            return 96
        return ord(character) - 31 if " " <= character <= "~" else 0

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join("\n" if n == 96 else chr(n + 31) if n else "?" for n in ids)

    def get_vocab(self) -> dict[str, int]:
        return {c: self._id(c) for c in string.printable}


class _Ids(dict[str, Any]):
    def __init__(self, ids: list[int]) -> None:
        super().__init__(input_ids=ids)
        self.input_ids = ids


class Scripted:
    """A model that goes on after each text it knows as it was told to, and else says `?`.

    The longest known beginning counts, so that a conversation may go on after an answer.
    """

    device = torch.device("cpu")
    generation_config = SimpleNamespace(eos_token_id=None)

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        self.known = known

    def forward(
        self, input_ids: Any, cache: Any = None, use_cache: bool = True, logits_to_keep: int = 0
    ) -> Any:
        rows = [[]] * len(input_ids) if cache is None else cache
        seen = [row + new for row, new in zip(rows, input_ids.tolist(), strict=True)]
        if cache is not None:
            cache[:] = seen
        logits = torch.zeros(len(seen), 1, 97)
        for row, ids in enumerate(seen):
            logits[row, 0, self._next(ids)] = 1
        return ModelOutput(logits=logits, cache=seen if cache is None else cache)

    __call__ = forward

    def _next(self, seen: list[int]) -> int:
        for told in range(len(seen), max(0, len(seen) - 300), -1):
            said = self.known.get(tuple(seen[:told]))
            if said is not None:
                spoken = seen[told:]
                if spoken == said[: len(spoken)] and len(spoken) < len(said):
                    return said[len(spoken)]
        return Characters()("?").input_ids[0]


@pytest.fixture(scope="session")
def characters() -> Characters:
    return Characters()


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a text, a book and word lists, under their usual names."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(7)
    words = [
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 6))) for _ in range(900)
    ]
    prose = "\n".join(" ".join(draw.choices(words, k=9)) + "." for _ in range(200))
    lists = {
        f"wonderwords/{n}list.txt": "\n".join(draw.sample(words, 400))
        for n in ("noun", "adjective", "verb")
    }
    for name, text in {"wikitext-2/test.txt": prose, "gutenberg/1661.txt": prose, **lists}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(params=MAKERS)
def any_task(request: pytest.FixtureRequest, data: Any, characters: Characters) -> Any:
    """`any_task(**settings)`: each task in turn, on the data folder, with few items."""
    maker, lengths = MAKERS[request.param]

    def make(**settings: Any) -> Any:
        chosen = {"limit": 3, "batch": 2, "lengths": lengths, "tokenizer": characters, **settings}
        return maker(TaskSettings(data, **chosen))

    return make


@pytest.fixture(scope="session")
def endless(tiny_model: Any) -> Any:
    """`endless(family)`: a tiny random model in float64 whose texts have no end."""

    def make(family: str) -> Any:
        model = tiny_model(family, dtype=torch.float64)
        model.generation_config.eos_token_id = None
        return model

    return make
