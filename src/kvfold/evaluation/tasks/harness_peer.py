"""Another project's method as lm-eval sees it: the harness's own model, but for the forwards.

Tokens, cuts, stops and scores are the harness's. Texts run one by one. A prompt's question is its
last part if it has one (after the examples), else its last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor

from kvfold.evaluation.continuation import continuation_logits
from kvfold.evaluation.continuation_scores import judged
from kvfold.evaluation.greedy import end_tokens, read
from kvfold.evaluation.peers.model import PeerModel
from kvfold.evaluation.tasks.harness_model import KvfoldLM, Request


class PeerLM(KvfoldLM):
    """questions: the text at the end of each prompt that asks, empty for none."""

    def __init__(self, peer: PeerModel, tokenizer: Any, questions: Mapping[str, str]) -> None:
        super().__init__(peer.plain, tokenizer=tokenizer, batch_size=1)
        self.peer, self.questions = peer, questions
        self._question = 1

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts in order, each asked for on its own."""
        found: list[str] = []
        for request in requests:
            question = self.questions.get(request.args[0], "")
            tokens = self.tok_encode(question, add_special_tokens=False) if question else ()
            self._question = max(1, len(tokens))
            found += super().generate_until([request], disable_tqdm=disable_tqdm)
        return found

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        **generation_kwargs: Any,
    ) -> Tensor:
        """Greedy tokens after one context, (1, seq) both together, up to a stop or an end."""
        ends = end_tokens(self.peer)
        question = min(self._question, context.shape[1])
        stops = stop_sequences_criteria(self.tokenizer, stop, context.shape[1], len(context))
        ids = context
        scores, cache = read(self.peer.asking([question]), context)
        while ids.shape[1] < max_length:
            new = scores.argmax(dim=-1)[:, None].to(ids.device)
            ids = torch.cat([ids, new], dim=1)
            if int(new) in ends or bool(torch.as_tensor(stops(ids, scores)).all()):
                break
            scores, cache = read(self.peer, new, cache)
        return ids

    def _loglikelihood_tokens(
        self,
        requests: list[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Each continuation on the cache that its compressed context has left."""
        return [self._score(*self._pair(*request[1:])) for request in requests]

    def _score(self, context: Any, continuation: Any) -> tuple[float, bool]:
        ids = torch.tensor([[*context, *continuation]])
        pieces = continuation_logits(self.peer, ids, len(context))
        logits = torch.cat([piece[0] for piece in pieces]).cpu()
        chosen, greedy = judged(logits, ids[0, len(context) :], self.softmax_dtype)
        return float(chosen.sum()), bool(greedy.all())
