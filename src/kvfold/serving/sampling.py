"""Choosing a token of one row: nothing here depends on what else is in the batch."""

from __future__ import annotations

import secrets
from collections import Counter

import torch
from torch import Tensor

from kvfold.serving.request import Sampling

SEED_LIMIT = 2**63


class Sampler:
    """One choice's own random numbers, and what it has generated so far.

    index: which of a request's choices it is; with a seed given, choice i is drawn from seed + i.
    """

    def __init__(self, settings: Sampling, index: int = 0) -> None:
        self.settings = settings
        seed = secrets.randbits(62) if settings.seed is None else settings.seed
        self.generator = torch.Generator().manual_seed((seed + index) % SEED_LIMIT)
        self.counts: Counter[int] = Counter()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, with nothing changed before."""
        changed = self.settings.logit_bias or self._penalises
        return self.settings.temperature == 0 and not changed

    @property
    def _penalises(self) -> bool:
        return bool(self.settings.presence_penalty or self.settings.frequency_penalty)

    def note(self, token: int) -> None:
        """Remember a token that was generated."""
        if self._penalises:
            self.counts[token] += 1

    def pick(self, logits: Tensor) -> int:
        """The next token for logits (vocabulary,)."""
        changed = self._changed(logits.detach().to("cpu", torch.float64, copy=True))
        if self.settings.temperature == 0:
            return int(changed.argmax())
        # Less the largest first: a temperature near 0 must not make infinities of both signs.
        scaled = (changed - changed.max()) / self.settings.temperature
        probabilities = scaled.softmax(dim=-1)
        if self.settings.top_p < 1:
            probabilities = nucleus(probabilities, self.settings.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def _changed(self, logits: Tensor) -> Tensor:
        for token, bias in self.settings.logit_bias.items():
            logits[token] += bias
        for token, count in self.counts.items():
            logits[token] -= (
                self.settings.presence_penalty + count * self.settings.frequency_penalty
            )
        return logits


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the fewest likeliest tokens that together have `top_p`; not normalised anew.

    probabilities: (vocabulary,). The likeliest token always stays.
    """
    ordered, places = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = before < top_p
    kept[0] = True
    return torch.zeros_like(probabilities).scatter(0, places[kept], ordered[kept])


def score(logits: Tensor, token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """A token's log probability, and the `top` likeliest tokens with theirs.

    logits: (vocabulary,).
    """
    scores = logits.float().log_softmax(dim=-1)
    found = scores.topk(min(top, scores.shape[0]))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return float(scores[token]), tuple(pairs)
