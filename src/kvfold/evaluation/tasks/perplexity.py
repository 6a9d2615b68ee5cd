"""The task `perplexity`: how well running text is predicted, at several lengths.

Each window's last `continuation` tokens are scored on their own: what the cache has kept of the
tokens before is what they are told by. A folded prompt or a plain one is scored in one pass, and
all of its tokens with them (`loss`): there a token sees what it would see if it came alone. Where a
prompt has no logits of its own (`prefill: skip`), or exact ones that feel nothing of the folding
(`prefill_attention: exact`, and other projects' methods), only `continuation_loss` exists, and the
continuation is fed to the cache that the prompt has left. So compare `continuation_loss` between
any two subjects, and `loss` between those that have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.anatomy import text_decoder
from kvfold.errors import EvaluationError
from kvfold.evaluation.chunks import CHUNK_ROWS
from kvfold.evaluation.continuation import (
    CHUNK,
    continuation_logits,
    decoding_chunk,
    one_forward_is_enough,
    summed_loss,
)
from kvfold.evaluation.tasks.selection import SelectedItems, in_batches
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Item, Subject
from kvfold.evaluation.tasks.texts import Windows, text_windows
from kvfold.runtime.attach import attachment_of
from kvfold.runtime.logits import logits

LENGTHS = (512, 1024, 2048)
TOKENS = 8192
"""Tokens of text at each length."""

CONTINUATION = 128
"""Tokens of a window that are scored apart; half of a window that is shorter than two of these."""


@dataclass(frozen=True)
class PerplexitySettings:
    """lengths: tokens of a window. tokens: of text at each length. continuation: see the module."""

    lengths: tuple[int, ...] = LENGTHS
    tokens: int = TOKENS
    continuation: int = CONTINUATION

    def __post_init__(self) -> None:
        """Raise `EvaluationError` for a length that leaves nothing to score."""
        if min(self.lengths) < 2 or self.continuation < 1 or self.tokens < 1:
            raise EvaluationError(
                "windows must have at least 2 tokens, and tokens and continuation must be at least "
                f"1; got lengths {list(self.lengths)}, tokens {self.tokens}, continuation "
                f"{self.continuation}"
            )

    def counts(self) -> dict[int, int]:
        """Windows of each length."""
        return {length: max(1, self.tokens // length) for length in sorted(set(self.lengths))}


class PerplexityTask(SelectedItems):
    """See the module."""

    name = "perplexity"

    def __init__(self, chosen: PerplexitySettings, windows: Windows, of_all: TaskSettings) -> None:
        self.chosen = chosen
        self.windows = windows
        every = [
            {"id": f"{length}/{number}", "length": length, "window": number}
            for length, made in windows.by_length.items()
            for number in range(len(made))
        ]
        super().__init__(every, {**asdict(chosen), "text": dict(windows.source)}, of_all)

    def asked(self) -> Sequence[Item]:
        """The windows as token ids, which the items are without."""
        return [{"ids": self._ids(item)} for item in self._items]

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        """Losses of each window, in nats a token."""

        def answer(alike: Sequence[Item]) -> list[Answer]:
            ids = torch.tensor([self._ids(item) for item in alike]).to(subject.model.device)
            continued = min(self.chosen.continuation, ids.shape[1] // 2)
            measure = _losses if subject.peer is None else _continuation_loss
            losses = {name: each.tolist() for name, each in measure(subject, ids, continued)}
            return [
                _answer(item, subject, {name: each[row] for name, each in losses.items()})
                for row, item in enumerate(alike)
            ]

        return in_batches(items, self.batch, lambda item: item["length"], answer)

    def summary(self, answers: Sequence[Answer]) -> Mapping[str, float]:
        """Perplexity at each length and over all tokens, of whole windows and of what follows.

        `perplexity/512` and `perplexity`; `continuation_perplexity/512` and
        `continuation_perplexity`. The first two only where whole windows could be scored.
        """
        found: dict[str, float] = {}
        for metric, name in (
            ("loss", "perplexity"),
            ("continuation_loss", "continuation_perplexity"),
        ):
            scored = [answer for answer in answers if metric in answer.scores]
            for length in dict.fromkeys(answer.said["length"] for answer in scored):
                alike = [answer for answer in scored if answer.said["length"] == length]
                found[f"{name}/{length}"] = self._perplexity(alike, metric)
            if scored:
                found[name] = self._perplexity(scored, metric)
        return found

    def _ids(self, item: Item) -> list[int]:
        return self.windows.by_length[item["length"]][item["window"]]

    def _perplexity(self, answers: Sequence[Answer], metric: str) -> float:
        losses = tokens = 0.0
        for answer in answers:
            length = answer.said["length"]
            continued = min(self.chosen.continuation, length // 2)
            count = length - 1 if metric == "loss" else continued
            losses, tokens = losses + count * _number(answer, metric), tokens + count
        return math.exp(losses / tokens)


def make(settings: TaskSettings) -> PerplexityTask:
    """The task, on `wikitext-2/test.txt` or the text that the settings name."""
    chosen = PerplexitySettings(settings.lengths or LENGTHS)
    return PerplexityTask(chosen, text_windows(settings, chosen.counts()), settings)


def _number(answer: Answer, metric: str) -> float:
    value = answer.scores[metric]
    assert not isinstance(value, Sequence)
    return float(value)


def _answer(item: Item, subject: Subject, losses: dict[str, float]) -> Answer:
    wrong = [name for name, loss in losses.items() if not math.isfinite(loss)]
    if wrong:
        raise EvaluationError(
            f"every loss must be finite; {subject.name} gave {wrong[0]} {losses[wrong[0]]} on "
            f"window {item['id']}; load the model in float32 or bfloat16, or fit its add-on on "
            "more text"
        )
    return Answer(item["id"], {"length": item["length"]}, losses)


@torch.no_grad()
def _losses(subject: Subject, ids: Tensor, continued: int) -> Iterable[tuple[str, Tensor]]:
    """Mean losses by metric, (batch,) float64 each."""
    attachment = attachment_of(subject.model)
    plan = None if attachment is None else attachment.plan
    prompt = ids.shape[1] - continued
    if not one_forward_is_enough(plan):
        return _continuation_loss(subject, ids, continued, decoding_chunk(plan))
    decoder = text_decoder(subject.model)
    hidden = decoder(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    before = _told(subject.model, hidden[:, : prompt - 1], ids[:, 1:prompt])
    after = _told(subject.model, hidden[:, prompt - 1 :], ids[:, prompt:])
    return [
        ("loss", (before + after) / (ids.shape[1] - 1)),
        ("continuation_loss", after / continued),
    ]


def _continuation_loss(
    subject: Subject, ids: Tensor, continued: int, chunk: int = CHUNK
) -> Iterable[tuple[str, Tensor]]:
    """Only of what follows on the cache that the prompt has left."""
    prompt = ids.shape[1] - continued
    pieces = continuation_logits(subject.model, ids, prompt, chunk=chunk)
    return [("continuation_loss", summed_loss(pieces, ids[:, prompt:]) / continued)]


def _told(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Summed loss of targets (batch, seq) that final hidden states (batch, seq, hidden) tell."""
    columns = max(1, CHUNK_ROWS // len(targets))
    pieces = (
        logits(model, hidden[:, start : start + columns])
        for start in range(0, hidden.shape[1], columns)
    )
    return summed_loss(pieces, targets)
