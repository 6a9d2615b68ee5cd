"""Perplexity, with its convention said aloud.

`perplexity = exp(mean_i -log p(x_i | x_<i))`. The same model and text give quite different figures
under different conventions (overlapping windows, special tokens, detokenised text), so `CONVENTION`
travels with every figure.
"""

from __future__ import annotations

import math

from kvfold.evaluation.chunks import LogitChunk

CONVENTION = (
    "whole text as one string, no special tokens; the first {windows} non-overlapping windows of "
    "{window} tokens; the first token of each window is not scored"
)


class Perplexity:
    """Mean token loss, in nats, and its exponential."""

    def __init__(self) -> None:
        self.loss_sum = 0.0
        self.tokens = 0

    def update(self, chunk: LogitChunk) -> None:
        """Add the loss of each target."""
        chosen = chunk.log_probs.gather(-1, chunk.targets[:, None])
        self.loss_sum -= float(chosen.double().sum())
        self.tokens += chunk.targets.shape[0]

    def result(self) -> dict[str, float]:
        """`loss` and `perplexity`."""
        loss = self.loss_sum / max(1, self.tokens)
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
