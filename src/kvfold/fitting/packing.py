"""A corpus as documents, and documents as windows of tokens without padding.

Where `kvfold.fitting.corpus` reads a corpus as one string, training wants to know where a document
ends: the tokenizer's end-of-text token stands there. Documents follow each other and go on across
windows, so long rows are only a matter of a larger window.

    document 0 <eos> document 1 <eos> docu | ment 2 <eos> document 3 ...
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.errors import CorpusError
from kvfold.evaluation.encoding import encode
from kvfold.fitting.corpus import (
    DEFAULT_CORPUS,
    HELD_OUT_FRACTION,
    check_window,
    cut_windows,
    default_documents,
    line_after,
    read_documents,
)

MOST_HELD_OUT = 2 * HELD_OUT_FRACTION
"""A document that would make the held-out part larger than this is cut at a line instead."""


class Documents(NamedTuple):
    """A corpus by name, and the texts of its two parts; no text is in both."""

    name: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def load_documents(corpus: str | Path | None = None, tokenizer: Any = None) -> Documents:
    """Read a corpus as documents and split them.

    corpus, tokenizer: as in `kvfold.fitting.corpus.load_corpus`. A text file is one document, and
    so is a record of JSON lines, a row of a hub data set, or a topic of the default corpus. Blank
    ones are left out. About the last tenth of the text is held out (of the default corpus every
    sixth topic), in whole documents where they are small enough, and what is held out is nowhere
    in the training part again. Raises `CorpusError` as `load_corpus` does, and where one of the
    parts is empty.
    """
    if corpus is None:
        name, (train, held_out) = DEFAULT_CORPUS, default_documents()
    else:
        name = str(corpus)
        written = [text for text in read_documents(name, tokenizer) if text.strip()]
        if not written:
            raise CorpusError(f"a corpus must have text in it; {name} is empty; name another")
        train, held_out = _split(written)
    documents = Documents(name, tuple(train), tuple(held_out))
    return without(documents, texts_of(documents.held_out))


def texts_of(documents: Iterable[str]) -> set[str]:
    """Documents as `without` compares them: white space around them is no difference."""
    return {document.strip() for document in documents}


def without(documents: Documents, texts: Collection[str]) -> Documents:
    """The same documents with none of these texts (see `texts_of`) in the training part.

    Raises `CorpusError` if nothing is left to train on, or nothing is held out.
    """
    kept = tuple(text for text in documents.train if text.strip() not in texts)
    if not kept or not documents.held_out:
        raise CorpusError(
            "a corpus must have text to train on and other text to hold out; of "
            f"{documents.name}, {len(documents.train)} documents are to train on, "
            f"{len(documents.train) - len(kept)} of which are held out as well, and "
            f"{len(documents.held_out)} are held out; use a longer or more varied text"
        )
    return documents._replace(train=kept)


def token_stream(documents: Iterable[str], tokenizer: Any, tokens: int | None = None) -> Tensor:
    """The tokens of documents in their order: (tokens,) int64.

    The tokenizer's end-of-text token stands between two documents, if it has one and the first
    does not end with it already; nothing else is added. tokens: only the first so many; then not
    many more documents are read.
    """
    end = tokenizer.eos_token_id
    stream = array("q")
    for document in documents:
        if stream and end is not None and stream[-1] != end:
            stream.append(end)
        left = None if tokens is None else tokens - len(stream)
        if left is not None and left <= 0:
            break
        stream.extend(encode(document, tokenizer, left))
    if not stream:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(stream, dtype=torch.int64)[:tokens]


def packed_windows(
    documents: Iterable[str], tokenizer: Any, *, window: int, tokens: int | None = None
) -> Tensor:
    """Windows of the stream of documents, without overlap or padding: (windows, window), int64.

    A last partial window is left out. tokens: at most this many, rounded down to whole windows.
    Raises `CorpusError` if there is not one whole window.
    """
    check_window(window, tokens)
    return cut_windows(token_stream(documents, tokenizer, tokens), window)


def _split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Documents to train on, and those from the one on in which the last tenth of the text begins.

    That one is cut at a line if the held-out part were too large with it.
    """
    total = sum(map(len, documents))
    start = int(total * (1 - HELD_OUT_FRACTION))
    before = number = 0
    while before + len(documents[number]) <= start:
        before += len(documents[number])
        number += 1
    if total - before <= MOST_HELD_OUT * total:
        return documents[:number], documents[number:]
    across = documents[number]
    cut = line_after(across, start - before)
    train, held_out = [*documents[:number], across[:cut]], [across[cut:], *documents[number + 1 :]]
    return [text for text in train if text.strip()], [text for text in held_out if text.strip()]
