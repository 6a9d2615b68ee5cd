"""How far an add-on's predictions are from the plain model's, on text that nothing was fitted to.

The measure that decides whether a stage of a training is kept: KL(base || folded) a token, with
the add-on attached for real, at its own plan. The plain model's final hidden states are computed
once and kept; logits are made a few rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.anatomy import anatomy
from kvfold.errors import CorpusError
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.recovery import without_history
from kvfold.evaluation.runner import PLAIN, History, Quality, Scorer
from kvfold.fitting.frozen import frozen
from kvfold.runtime.attach import AddOnLike
from kvfold.runtime.logits import plain_hidden_states

TOKENS_PER_BATCH = 4096


class HeldOut:
    """Held-out text, and the plain model's quality on it.

    tokens: (windows, seq) int64, without padding. base: the plain model's quality. Raises
    `CorpusError` for text without a token to predict.
    """

    def __init__(self, model: Any, tokens: Tensor) -> None:
        if tokens.ndim != 2 or not len(tokens) or tokens.shape[1] < 2:
            raise CorpusError(
                "held-out text must be at least one window of 2 tokens, (windows, seq); got "
                f"{tuple(tokens.shape)}"
            )
        self.model, self.tokens = model, tokens
        rows = max(1, TOKENS_PER_BATCH // tokens.shape[1])
        batches = [part.to(model.device) for part in torch.split(tokens, rows)]
        with frozen(model):
            hidden = [plain_hidden_states(model, ids).cpu() for ids in batches]
            self.scorer = Scorer(model, batches, hidden)
            self.base: Quality = self.scorer.score(PLAIN, hidden)

    def measure(self, name: str, addon: AddOnLike) -> Quality:
        """Quality with the add-on attached; raises `EvaluationError` if it is not finite.

        Histories are folded as the plan's prompts are. A plan whose prompts skip layers is
        measured with prompts that don't, since skipped tokens have no predictions.
        """
        shown = _as_measured(addon)
        history: History = "exact" if shown.plan.prefill_attention == "exact" else "folded"
        with frozen(self.model):
            return self.scorer.measure(name, shown, history)[0]

    def dropped(self, addon: AddOnLike) -> Quality:
        """Quality with the same anchors and window, and the history dropped: the yardstick."""
        shown = without_history(_as_measured(addon), anatomy(self.model))
        with frozen(self.model):
            return self.scorer.measure("history dropped", shown, "folded")[0]


def _as_measured(addon: AddOnLike) -> AddOnLike:
    if addon.plan.prefill != "skip":
        return addon
    return with_plan(addon, prefill="full", state_projector=False)
