"""LAMBADA: the last word of a passage, which only all of it tells (Paperno et al. 2016).

Accuracy as lm-eval counts it: right if greedy decoding would give every token of the last word,
with the space before it, after the rest of the passage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvfold.evaluation.records import Record, read_records
from kvfold.evaluation.share import Share


def read_passages(path: str | Path, count: int | None = None) -> list[str]:
    """Passages of a JSON-lines file with the key `text`, at most `count` from its start.

    Raises `EvaluationError`, naming the line, for one that is no such object or has no two words.
    """
    return [str(record.data["text"]) for record in read_passage_records(path, count)]


def read_passage_records(path: str | Path, count: int | None = None) -> list[Record]:
    """The same, with the line that each comes from."""
    return read_records(
        path, {"text": str}, what="passage", count=count, complaint=_lacks_a_last_word
    )


def _lacks_a_last_word(record: Mapping[str, Any]) -> str | None:
    text = str(record["text"])
    before, space, last = text.rpartition(" ")
    if space and before.strip() and last.strip():
        return None
    return f"must have a passage of at least two words, the last after a space; got {text!r}"


@torch.no_grad()
def lambada(model: Any, passages: Sequence[str], tokenizer: Any) -> list[bool]:
    """Whether the last word of each passage comes out right, in order.

    model: plain, or with an add-on attached that has logits for its prompts.
    """
    return [_right(model, passage, tokenizer) for passage in passages]


def _right(model: Any, passage: str, tokenizer: Any) -> bool:
    context, _ = passage.rsplit(" ", 1)
    before = len(tokenizer(context, add_special_tokens=False).input_ids)
    ids = tokenizer(passage, add_special_tokens=False, return_tensors="pt").input_ids
    ids = ids.to(model.device)
    chosen = model(input_ids=ids[:, :-1]).logits[:, before - 1 :].argmax(dim=-1)
    return bool(torch.equal(chosen, ids[:, before:]))


def share(right: Sequence[bool]) -> Share:
    """Accuracy, with its interval."""
    return Share(sum(right), len(right))
