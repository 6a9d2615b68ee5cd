"""Recall of facts from a document, by generating the answers to questions about it.

The prompts are `tiny_language`'s. An answer is right if every word of it is: greedy decoding, as
many words as the answer has. Shares are of few prompts, so each comes with its Wilson interval.
The task `recall` asks for facts of every kind at several lengths of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvfold.errors import EvaluationError
from kvfold.evaluation.greedy import read, speak
from kvfold.evaluation.share import Share
from kvfold.evaluation.tasks.selection import SelectedItems, in_batches
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Item, Subject
from kvfold.evaluation.tasks.texts import require_tokenizer, speaks_tiny_language
from kvfold.evaluation.tiny_language import (
    QUESTION_WORDS,
    RECALL_KINDS,
    RecallKind,
    RecallPrompt,
    recall_prompt,
)

Words = tuple[str | None, ...]
"""Generated words; None for a token id that no word has."""


@dataclass(frozen=True)
class RecallReport:
    """Answers to prompts, and which were right, in the prompts' order."""

    prompts: tuple[RecallPrompt, ...]
    answers: tuple[Words, ...]
    right: tuple[bool, ...]

    def share(self, among: Callable[[RecallPrompt], bool] = lambda _: True) -> Share:
        """The share of right answers, over all prompts or those that `among` says yes to."""
        judged = [r for p, r in zip(self.prompts, self.right, strict=True) if among(p)]
        return Share(sum(judged), len(judged))

    def by_kind(self) -> dict[str, Share]:
        """The share of right answers of each kind of question that was asked."""
        kinds = dict.fromkeys(prompt.kind for prompt in self.prompts)
        return {kind: self.share(_asks(kind)) for kind in kinds}

    def split_at(self, boundary: int) -> tuple[Share, Share]:
        """Shares where the fact ends by this position of the prompt, and where it begins there.

        A fact that stands across the boundary is in neither.
        """
        before = self.share(lambda prompt: prompt.fact[1] <= boundary)
        return before, self.share(lambda prompt: prompt.fact[0] >= boundary)

    def to_dict(self) -> dict[str, Any]:
        """Shares as plain data for JSON."""
        kinds = {kind: share.to_dict() for kind, share in self.by_kind().items()}
        return {"overall": self.share().to_dict(), "by_kind": kinds}


def _asks(kind: RecallKind) -> Callable[[RecallPrompt], bool]:
    return lambda prompt: prompt.kind == kind


def score(prompts: Sequence[RecallPrompt], answers: Sequence[Sequence[str | None]]) -> RecallReport:
    """Judge generated answers: right is the whole answer, word by word, and nothing else.

    Raises `EvaluationError` unless there is one answer for each prompt, and at least one prompt.
    """
    if not prompts or len(prompts) != len(answers):
        raise EvaluationError(
            "there must be one answer for each prompt, and at least one prompt; got "
            f"{len(answers)} answers to {len(prompts)} prompts; pass both in the same order"
        )
    given = tuple(tuple(answer) for answer in answers)
    right = tuple(p.answer == answer for p, answer in zip(prompts, given, strict=True))
    return RecallReport(tuple(prompts), given, right)


def recall(
    model: Any, prompts: Sequence[RecallPrompt], tokenizer: Any, *, batch: int = 8
) -> RecallReport:
    """Generate the answer to every prompt and judge it.

    model: plain, or with an add-on attached. tokenizer: one token a word. batch: prompts of one
    length and one length of answer that are generated at once, so that nothing is padded. Raises
    `EvaluationError` for no prompts, or for a prompt with a word that the tokenizer does not know.
    """
    answers: dict[int, Words] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault((len(prompt.words), len(prompt.answer)), []).append(number)
    for (_, words), members in groups.items():
        for start in range(0, len(members), batch):
            numbers = members[start : start + batch]
            made = _generated(model, [prompts[n] for n in numbers], tokenizer, words)
            answers.update(zip(numbers, made, strict=True))
    return score(prompts, [answers[number] for number in range(len(prompts))])


def _generated(
    model: Any, prompts: Sequence[RecallPrompt], tokenizer: Any, words: int
) -> list[Words]:
    ids = torch.tensor([_ids(prompt, tokenizer) for prompt in prompts])
    rows = speak(model, *read(model, ids), words).tolist()
    return [tuple(tokenizer.convert_ids_to_tokens(row)) for row in rows]


def _ids(prompt: RecallPrompt, tokenizer: Any) -> list[int]:
    known = tokenizer.get_vocab()
    missing = [word for word in (*prompt.words, *prompt.answer) if word not in known]
    if missing:
        raise EvaluationError(
            "the tokenizer must have a token for every word of the prompts; it has none for "
            f"{missing[0]!r}; use the tokenizer of a model that was trained on this language"
        )
    return [known[word] for word in prompt.words]


LENGTHS = (256, 512, 1024)
EACH = 12


@dataclass(frozen=True)
class RecallSettings:
    """lengths: words of a prompt. each: prompts of every kind and length."""

    lengths: tuple[int, ...] = LENGTHS
    each: int = EACH
    seed: int = 0


class RecallTask(SelectedItems):
    """Questions of every kind at several lengths; see the module."""

    name = "recall"
    parts = (("length",), ("kind",))

    def __init__(self, chosen: RecallSettings, of_all: TaskSettings) -> None:
        self.chosen = chosen
        every = [
            _item(f"{length}/{kind}/{number}", length, kind, chosen.seed)
            for length in sorted(set(chosen.lengths))
            for kind in RECALL_KINDS
            for number in range(chosen.each)
        ]
        super().__init__(every, asdict(chosen), of_all)

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        """What was answered, and whether it is right; with kind, length and the fact's place."""

        def answer(alike: Sequence[Item]) -> list[Answer]:
            model = subject.asked([QUESTION_WORDS[item["kind"]] for item in alike])
            prompts = [_prompt(item) for item in alike]
            report = recall(model, prompts, subject.tokenizer, batch=self.batch)
            judged = zip(alike, report.answers, report.right, strict=True)
            return [_answer(item, words, right) for item, words, right in judged]

        def like(item: Item) -> tuple[int, int]:
            return item["length"], len(item["answer"])

        return in_batches(items, self.batch, like, answer)


def make(settings: TaskSettings) -> RecallTask:
    """The task; `EvaluationError` for a tokenizer of another language than the tiny one."""
    require_tokenizer(settings)
    if not speaks_tiny_language(settings.tokenizer):
        raise EvaluationError(
            "the task recall asks in the tiny hybrid's own language; this model's tokenizer has no "
            "token for some of its words; run it on tiny-hybrid, and `needle`, `ruler` or `turns` "
            "on other models"
        )
    return RecallTask(RecallSettings(settings.lengths or LENGTHS, seed=settings.seed), settings)


def _item(name: str, length: int, kind: RecallKind, seed: int) -> dict[str, Any]:
    try:
        prompt = recall_prompt(f"task {seed} {name}", kind, length)
    except ValueError as error:
        raise EvaluationError(
            f"a prompt must be long enough for a fact and a question; {error}; ask for longer ones"
        ) from None
    return {
        "id": name,
        "kind": kind,
        "length": length,
        "words": list(prompt.words),
        "answer": list(prompt.answer),
        "fact": list(prompt.fact),
    }


def _prompt(item: Item) -> RecallPrompt:
    first, last = item["fact"]
    return RecallPrompt(item["kind"], tuple(item["words"]), tuple(item["answer"]), (first, last))


def _answer(item: Item, words: Words, right: bool) -> Answer:
    said = {name: item[name] for name in ("kind", "length", "fact", "answer")}
    return Answer(item["id"], {**said, "words": list(words)}, {"accuracy": right})
