"""The task `ruler`: finding, following and counting things in a long text, after RULER.

Prompts are of `ruler_prompts`, or of a JSON-lines file that RULER's own programs have made
(`ruler_file`). Scored as the paper does (Hsieh et al. 2024): the share of the expected strings that
occur in the output. The output may have as many tokens as they have, and a few more, which is less
than the paper's 30 to 128: a model that goes on about something else first is right there only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvfold.errors import EvaluationError
from kvfold.evaluation.greedy import says
from kvfold.evaluation.records import read_records
from kvfold.evaluation.tasks.files import data_file, several_files
from kvfold.evaluation.tasks.ruler_prompts import (
    KINDS,
    SPARE_TOKENS,
    WordLists,
    ruler_prompt,
    share_said,
    word_list,
)
from kvfold.evaluation.tasks.selection import (
    QUESTION,
    SelectedItems,
    in_batches,
    questions,
    selected,
)
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Item, Subject
from kvfold.evaluation.tasks.texts import require_tokenizer, speaks_tiny_language

LENGTHS = (512, 1024)
EACH = 4
LISTS = ("nounlist", "adjectivelist", "verblist")
FILE = "ruler/niah_multikey_3_4096.jsonl"
FILE_ITEMS = 20


@dataclass(frozen=True)
class RulerSettings:
    """lengths: tokens of a prompt. each: prompts of every kind and length."""

    lengths: tuple[int, ...] = LENGTHS
    kinds: tuple[str, ...] = KINDS
    each: int = EACH
    seed: int = 0


class RulerTask(SelectedItems):
    """Prompts that are there already, and what is to be said of them; see the module.

    every: each with id, kind, length (of the group of the report), ids, answers, new_tokens,
    question.
    """

    parts = (("kind",), ("length",), ("kind", "length"))

    def __init__(
        self,
        name: str,
        every: Sequence[Item],
        described: Mapping[str, Any],
        of_all: TaskSettings,
    ) -> None:
        self.name = name
        super().__init__(every, described, of_all)

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        """What was said after each prompt, and the share of the expected strings in it."""

        def answer(alike: Sequence[Item]) -> list[Answer]:
            prompts, room = [item["ids"] for item in alike], alike[0]["new_tokens"]
            model = subject.asked(questions(alike))
            told = says(model, prompts, subject.tokenizer, room)
            return [_answer(item, text) for item, text in zip(alike, told, strict=True)]

        def like(item: Item) -> tuple[int, int]:
            return len(item["ids"]), item["new_tokens"]

        return in_batches(items, self.batch, like, answer)


def make(settings: TaskSettings) -> RulerTask:
    """The task on prompts made of the word lists in `wonderwords/`."""
    _require_language(settings)
    chosen = RulerSettings(settings.lengths or LENGTHS, seed=settings.seed)
    files = several_files(settings, [f"wonderwords/{name}.txt" for name in LISTS])
    words = WordLists(*(word_list(file) for file in files))
    every = []
    for kind in chosen.kinds:
        for length in sorted(set(chosen.lengths)):
            for number in range(chosen.each):
                made = ruler_prompt(
                    kind, f"{chosen.seed} {length} {number}", length, words, settings.tokenizer
                )
                asked = {**asdict(made), "answers": list(made.answers)}
                every.append({"id": f"{kind}/{length}/{number}", "length": length, **asked})
    described = {**asdict(chosen), "words": [file.to_dict() for file in files]}
    return RulerTask("ruler", every, described, settings)


def make_from_file(settings: TaskSettings) -> RulerTask:
    """The task on a file of RULER's own: `ruler/niah_multikey_3_4096.jsonl`, or the one named.

    Each line is an object with `input`, whose last line is the question, and `outputs`. Raises
    `EvaluationError` naming a line that is not.
    """
    _require_language(settings)
    file = data_file(settings, FILE)
    every = []
    kind = file.path.stem
    fields = {"input": str, "outputs": list}
    records = read_records(file.path, fields, what="prompt", complaint=_lacks_text)
    for record in selected(records, TaskSettings(None, limit=FILE_ITEMS)):
        text, answers = record.data["input"], record.data["outputs"]
        ids, room, question = (
            settings.tokenizer(part, add_special_tokens=False, verbose=False).input_ids
            for part in (text, ", ".join(answers), text[text.rfind("\n") + 1 :])
        )
        every.append(
            {
                "id": f"{kind}/{record.where.rsplit(':', 1)[1]}",
                "kind": kind,
                "length": -(-len(ids) // 512) * 512,
                "ids": ids,
                "answers": answers,
                "new_tokens": len(room) + SPARE_TOKENS,
                QUESTION: len(question),
            }
        )
    described = {"file": file.to_dict(), "of_lines": len(records)}
    return RulerTask("ruler_file", every, described, settings)


def _lacks_text(record: Mapping[str, Any]) -> str | None:
    answers = record["outputs"]
    if record["input"] and answers and all(isinstance(a, str) and a for a in answers):
        return None
    return "must have an input and outputs that are strings, and none of them empty"


def _require_language(settings: TaskSettings) -> None:
    require_tokenizer(settings)
    if speaks_tiny_language(settings.tokenizer):
        raise EvaluationError(
            "this task asks in English, of which the tiny language's tokenizer knows nothing; run "
            "`recall` or `turns` on this model instead"
        )


def _answer(item: Item, text: str) -> Answer:
    said = {name: item[name] for name in ("kind", "length", "answers")}
    score = share_said(text, item["answers"])
    return Answer(item["id"], {**said, "text": text}, {"score": score})
