"""What every task of the evaluation suite is: items, answers to them, and scores of each answer.

A task makes its items once, from its settings alone. Subjects answer them one chunk after another,
so that a run that was killed goes on at the chunk where it stopped; an answer may depend on its
own chunk's items (which are padded together) and on nothing else. What is reported is made of the
scores of single answers, so that two subjects can be compared item by item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvfold.runtime.attach import AddOnLike

if TYPE_CHECKING:
    from kvfold.evaluation.peers.model import PeerModel

Item = Mapping[str, Any]
"""One thing to do, as plain data; `id`, a string, is unlike every other item's of the task."""

Scores = Mapping[str, bool | float | Sequence[bool]]
"""By metric. A bool is one answer, right or wrong; a sequence of them, several judged apart; a
number is averaged over items."""


@dataclass(frozen=True)
class Answer:
    """What a subject said to an item, and what that is worth.

    item: the item's id. said: plain data, as much as a reader needs to judge by themselves.
    """

    item: str
    said: Mapping[str, Any]
    scores: Scores

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"item": self.item, "said": dict(self.said), "scores": dict(self.scores)}


@dataclass(frozen=True)
class Subject:
    """Who is asked: a model, the add-on that is attached to it, and its tokenizer.

    model: with the add-on attached already. addon: None for the plain model. peer: the model
    itself where it is another project's, which runs in a process of its own.
    """

    name: str
    model: Any
    tokenizer: Any
    addon: AddOnLike | None = None
    peer: PeerModel | None = None

    def asked(self, questions: Sequence[int]) -> Any:
        """The model, for prompts whose last tokens are questions about what stands before them.

        questions: how many tokens, of each row. Only peers make a difference of it: they compress
        a context before they see what is asked of it.
        """
        return self.model if self.peer is None else self.peer.asking(questions)

    @property
    def local(self) -> Any:
        """The model in this process: for a peer, the plain one."""
        return self.model if self.peer is None else self.peer.plain


class Task(Protocol):
    """One task; made from its settings, which must be plain data and tell everything of it."""

    name: str
    """As on the command line, for instance `lambada`."""

    chunk: int
    """Items that are answered together: what at most is lost if a run is killed."""

    not_for_peers: str | None
    """Why other projects' methods are not asked, in words; None if they are."""

    parts: Sequence[tuple[str, ...]]
    """Keys of what answers say, by which scores are told apart as well: `accuracy/length 512` for
    `("length",)`; several keys name one group together."""

    def settings(self) -> Mapping[str, Any]:
        """All that the items and scores depend on: counts, seeds, digests of data files."""

    def items(self) -> Sequence[Item]:
        """Every item, in order; the same at every call."""

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        """One answer to each item, in order."""

    def summary(self, answers: Sequence[Answer]) -> Mapping[str, float]:
        """Figures that are no averages of scores (perplexity, for one); often none.

        answers: at least one; not always of every item, and some more than once, since intervals
        come from resampled answers. A figure that these can't tell is left out.
        """
