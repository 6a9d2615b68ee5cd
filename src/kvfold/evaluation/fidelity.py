"""How close the folded model's predictions stay to the plain model's, whatever the text says.

`KL = mean_i sum_v p_i(v) * (log p_i(v) - log q_i(v))` with p the plain model's distribution and q
the folded one's, in nats. Perplexity can hide a change that happens to please the text; KL can't.
"""

from __future__ import annotations

from kvfold.evaluation.chunks import LogitChunk

TOP = 5


class Fidelity:
    """Mean KL(base || folded) and agreement of the likeliest tokens.

    Top-1 agreement is the share of positions whose likeliest token is the same; top-5 agreement
    is the share of the base model's five likeliest tokens that are among the folded model's five.
    """

    def __init__(self) -> None:
        self.kl_sum = 0.0
        self.top_1_sum = 0
        self.top_5_sum = 0.0
        self.tokens = 0

    def update(self, chunk: LogitChunk) -> None:
        """Add each position's divergence and agreements."""
        base, folded = chunk.base_log_probs, chunk.log_probs
        self.kl_sum += float((base.exp() * (base - folded)).sum(-1).double().sum())
        count = min(TOP, base.shape[-1])
        base_top, folded_top = base.topk(count).indices, folded.topk(count).indices
        self.top_1_sum += int((base_top[:, 0] == folded_top[:, 0]).sum())
        shared = int((base_top[:, :, None] == folded_top[:, None, :]).sum())
        self.top_5_sum += shared / count
        self.tokens += base.shape[0]

    def result(self) -> dict[str, float]:
        """`kl`, `top_1_agreement` and `top_5_agreement`."""
        tokens = max(1, self.tokens)
        return {
            "kl": self.kl_sum / tokens,
            "top_1_agreement": self.top_1_sum / tokens,
            "top_5_agreement": self.top_5_sum / tokens,
        }
