"""Windows of running text for the tasks that predict it, from a file or in the tiny language.

Convention: a file is one string without special tokens, and its windows begin at its start and do
not overlap, those of other lengths included: no token is told twice. A tokenizer of the tiny
language gets documents of that language instead, one a window: it knows no other text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.errors import CorpusError, EvaluationError
from kvfold.evaluation.encoding import encode
from kvfold.evaluation.tasks.files import DataFile, data_file
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tiny_language import VOCABULARY, training_document

DEFAULT_TEXT = "wikitext-2/test.txt"


@dataclass(frozen=True)
class Windows:
    """Token windows by length, and what they were cut from, as plain data for settings."""

    by_length: Mapping[int, Sequence[list[int]]]
    source: Mapping[str, Any]


def text_windows(settings: TaskSettings, counts: Mapping[int, int]) -> Windows:
    """So many windows of each length.

    counts: windows by their length in tokens. A text too short for them all gives each length the
    same share of it, and one window at least. Raises `EvaluationError` for a text without a window
    of each length, one in another language than the tokenizer's, and as `data_file` does.
    """
    require_tokenizer(settings)
    if speaks_tiny_language(settings.tokenizer):
        return _documents(settings, counts)
    file = data_file(settings, DEFAULT_TEXT)
    most = sum(length * count for length, count in counts.items())
    ids = file_tokens(file, settings.tokenizer, most)
    needed = sum(counts)
    require_length(file, ids, needed)
    made, start = {}, 0
    for number, (length, count) in enumerate(counts.items()):
        needed -= length
        share = min((len(ids) - start) // (len(counts) - number), len(ids) - start - needed)
        stop = start + length * max(1, min(count, share // length))
        made[length] = [ids[at : at + length] for at in range(start, stop, length)]
        start = stop
    return Windows(made, file.to_dict())


def file_tokens(file: DataFile, tokenizer: Any, tokens: int | None = None) -> list[int]:
    """The ids of a file's text, or of its beginning; `EvaluationError` naming it if unknown."""
    try:
        return encode(file.text, tokenizer, tokens)
    except CorpusError as error:
        raise EvaluationError(f"{file.path}: {error}") from None


def require_length(file: DataFile, ids: Sequence[int], length: int) -> None:
    """Raise `EvaluationError` if a file has fewer tokens than that."""
    if len(ids) < length:
        lines = file.text.count("\n") + (not file.text.endswith("\n"))
        raise EvaluationError(
            f"{file.path} must have at least {length} tokens; it ends at line {lines} after "
            f"{len(ids)}; name a longer text or a shorter length"
        )


def require_tokenizer(settings: TaskSettings) -> None:
    """Raise `EvaluationError` if there is no tokenizer to count tokens with."""
    if settings.tokenizer is None:
        raise EvaluationError(
            "this task counts in tokens and needs a tokenizer; got none; set "
            "TaskSettings.tokenizer to the model's"
        )


def speaks_tiny_language(tokenizer: Any) -> bool:
    """Whether every word of `tiny_language` is a token."""
    known = tokenizer.get_vocab()
    return all(word in known for word in VOCABULARY)


def tiny_ids(words: Sequence[str], tokenizer: Any) -> list[int]:
    """One token a word of the tiny language."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(words))
    return ids


def _documents(settings: TaskSettings, counts: Mapping[int, int]) -> Windows:
    made = {
        length: [
            tiny_ids(
                training_document(f"text {settings.seed} {length} {n}", length)[0],
                settings.tokenizer,
            )
            for n in range(count)
        ]
        for length, count in counts.items()
    }
    return Windows(made, {"name": "documents of the tiny language", "seed": settings.seed})
