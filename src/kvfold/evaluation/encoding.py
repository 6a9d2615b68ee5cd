"""Text to token ids, without reading more of a long text than is needed.

What is fitted on and what is measured on go through the same lines, so that a text in another
language than the model's is refused in both places.
"""

from __future__ import annotations

from typing import Any

from kvfold.errors import CorpusError

CHARACTERS_READ_PER_TOKEN = 16
"""A first guess that is doubled until enough tokens are there."""

ENCODING_MARGIN = 64
"""Tokens at the end of a cut text that may differ from the whole text's."""

MOST_UNKNOWN = 0.5
"""A text of which a tokenizer knows less than this share is in another language than its model."""


def encode(text: str, tokenizer: Any, tokens: int | None = None) -> list[int]:
    """The token ids of a text, without special tokens around it.

    tokens: only the first so many, for which not much more of the text is read. Raises
    `CorpusError` for a text most of which the tokenizer does not know.
    """
    ids = _encode(text, tokenizer, tokens)
    # A word-level tokenizer without an unknown token gives padding for what it does not know.
    nothing = {getattr(tokenizer, f"{kind}_token_id", None) for kind in ("unk", "pad")} - {None}
    unknown = sum(number in nothing for number in ids)
    if unknown > MOST_UNKNOWN * len(ids):
        raise CorpusError(
            "a text must be in the model's language; the tokenizer does not know "
            f"{unknown:,} of its first {len(ids):,} words; name a text of that language (the tiny "
            "hybrid knows only its own: python training/tales.py writes one)"
        )
    return ids


def _encode(text: str, tokenizer: Any, tokens: int | None) -> list[int]:
    length = len(text) if tokens is None else tokens * CHARACTERS_READ_PER_TOKEN
    while True:
        encoded = tokenizer(text[:length], add_special_tokens=False, verbose=False)
        ids: list[int] = encoded["input_ids"]
        if length >= len(text):
            return ids if tokens is None else ids[:tokens]
        if tokens is not None and len(ids) >= tokens + ENCODING_MARGIN:
            return ids[:tokens]
        length *= 2
