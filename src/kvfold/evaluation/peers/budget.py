"""How many tokens of a prompt a peer may keep.

    kept = floor(prompt / times_smaller) - question            of a peer such as snapkv@4x
    kept = floor(stored bytes(prompt) / bytes a token) - question      of one like a subject

Bytes are those of the whole prompt, the question included, which peers keep whole: so two subjects
of the same size have the same bytes when the answer begins. stored bytes: what the subject's cache
has at that length, anchors and window included, in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.anatomy import Anatomy
from kvfold.evaluation.memory import memory_at
from kvfold.evaluation.peers.spec import PeerSpec
from kvfold.plan import Plan

LEAST_CONTEXT = 6
"""Fewest tokens that kvpress' methods can choose among: some leave the first 4 out."""


@dataclass(frozen=True)
class Budget:
    """Of one peer on one model. plan: of the subject that it is like, None for none."""

    spec: PeerSpec
    shape: Anatomy
    plan: Plan | None = None

    def kept(self, prompt: int, question: int) -> int | None:
        """Tokens kept of a prompt's context, at least 1; None where the whole context stays.

        prompt: tokens, question included. It stays whole where a peer drops no tokens at all,
        where all of it fits, and where it is too short for the method to look at.
        """
        context = prompt - question
        if not self.spec.drops_tokens or context < LEAST_CONTEXT:
            return None
        kept = max(1, self._all_tokens(prompt) - question)
        return kept if kept < context else None

    def _all_tokens(self, prompt: int) -> int:
        if self.spec.times_smaller is not None:
            return int(prompt / self.spec.times_smaller)
        (memory,) = memory_at(self.plan, self.shape, (prompt,))
        return memory.stored_bytes * prompt // memory.plain_bytes
