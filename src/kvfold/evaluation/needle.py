"""A needle in a haystack: a sentence with a number somewhere in a long text, asked for at its end.

`... The secret number of the harbour is 48213. ...` stands at some depth of a book's text, and the
prompt ends in `The secret number of the harbour is`. Right if greedy decoding goes on with exactly
that number. Which place and which number follows from the seed and the needle's own number.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import EvaluationError

PLACES = ("harbour", "library", "orchard", "station", "tower", "bakery", "museum", "garden")
DIGITS = 5
NEW_TOKENS = 8
"""Room for the number in any tokenizer, with what follows it."""


@dataclass(frozen=True)
class Needle:
    """One prompt. ids: (tokens,); answer: the digits; depth: of the needle, from 0 to 1."""

    ids: Tensor
    answer: str
    depth: float


def needles(
    haystack: str, tokenizer: Any, *, length: int, depths: Sequence[float], each: int, seed: int = 0
) -> list[Needle]:
    """Prompts of `length` tokens: `each` at every depth.

    haystack: a text of at least `length` tokens. depths: where the needle stands among the
    haystack's tokens, 0 at the beginning, 1 right before the question. Raises `EvaluationError`
    for a text too short, no room beside needle and question, or depths outside 0 to 1.
    """
    hay = tokenizer(haystack, add_special_tokens=False).input_ids
    if not all(0 <= depth <= 1 for depth in depths):
        raise EvaluationError(f"depths must be from 0 to 1; got {list(depths)}")
    if len(hay) < length:
        raise EvaluationError(
            f"the haystack must have at least {length} tokens; it has {len(hay)}; give a longer "
            "text or a shorter length"
        )
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
    return Needle(torch.tensor([*text[:at], *inner, *text[at:], *end]), answer, depth)


@torch.no_grad()
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
        ids = torch.stack([prompt.ids for prompt in part]).to(model.device)
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id or 0,
        )
        for prompt, row in zip(part, made[:, ids.shape[1] :], strict=True):
            found = re.match(r"\s*(\d+)", tokenizer.decode(row, skip_special_tokens=True))
            right.append(found is not None and found[1] == prompt.answer)
    return right
