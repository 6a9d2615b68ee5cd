"""LAMBADA: the last word of a passage, which only all of it tells (Paperno et al. 2016).

Accuracy as lm-eval counts it: right if greedy decoding would give every token of the last word,
with the space before it, after the rest of the passage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvfold.errors import EvaluationError
from kvfold.evaluation.share import Share


def read_passages(path: str | Path, count: int | None = None) -> list[str]:
    """Passages of a JSON-lines file with the key `text`, at most `count` from its start.

    Raises `EvaluationError`, naming the line, for one that is no such object or has no two words.
    """
    passages: list[str] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if count is not None and len(passages) >= count:
                    break
                if line.strip():
                    passages.append(_passage(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"LAMBADA must be a JSON-lines file in UTF-8; {error}") from None
    if not passages:
        raise EvaluationError(f"LAMBADA must have at least one passage; {path} has none")
    return passages


def _passage(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
        words = text.split()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(
            f"{where} must be a JSON object with a text ({type(error).__name__}: {error})"
        ) from None
    if len(words) < 2:
        raise EvaluationError(f"{where} must have a passage of at least two words; got {text!r}")
    return str(text)


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
