"""IFEval through lm-eval's `ifeval`: instructions that can be checked (Zhou et al. 2023).

Four scores: whether all instructions of a prompt were followed, or each of them, judged strictly
or loosely (also right if it is with the first or last line, or asterisks, left out).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvfold.errors import EvaluationError, MissingExtraError
from kvfold.evaluation.records import read_records
from kvfold.evaluation.tasks.harness import HarnessTask, data_files, require_harness
from kvfold.evaluation.tasks.sentence_model import require_sentence_model
from kvfold.evaluation.tasks.settings import TaskSettings

FIELDS = {"key": int, "prompt": str, "instruction_id_list": list, "kwargs": list}


def ifeval(
    settings: TaskSettings, *, chat_template: bool = False, max_gen_toks: int | None = None
) -> HarnessTask:
    """The task on `ifeval/input_data.jsonl`, or on the hub's records.

    Raises `EvaluationError` naming a line that is bad or whose instructions the scorer does not
    know, and `MissingExtraError` where the scorer lacks something.
    """
    files = data_files(settings, {"train": "ifeval/input_data.jsonl"})
    splits = {
        name: read_records(path, FIELDS, what="prompt", complaint=_wrong_instructions)
        for name, path in files.items()
    }
    require_harness()
    require_sentence_model()
    _require_scorer()
    task = HarnessTask(
        name="ifeval",
        task="ifeval",
        folder="ifeval",
        splits=splits,
        files=files,
        chosen=settings,
        chunk=settings.batch,
        chat_template=chat_template or settings.chat_template,
        max_gen_toks=settings.answer_tokens if max_gen_toks is None else max_gen_toks,
        scoring=without_chance,
    )
    with without_chance():
        records = splits.get("train", ())
        for record, doc in zip(records, task.harness.eval_docs if records else (), strict=True):
            _check_scorable(task, record.where, doc)
    return task


@contextmanager
def without_chance() -> Iterator[None]:
    """Let the scorer judge a text alike every time.

    It guesses languages by random draws, and draws what a prompt leaves open.
    """
    from langdetect import DetectorFactory

    seed, state = DetectorFactory.seed, random.getstate()
    DetectorFactory.seed = 0
    random.seed(0)
    try:
        yield
    finally:
        DetectorFactory.seed = seed
        random.setstate(state)


def _wrong_instructions(record: Mapping[str, Any]) -> str | None:
    ids, settings = record["instruction_id_list"], record["kwargs"]
    if not record["prompt"].strip():
        return "must have a prompt; got an empty one"
    if not ids or not all(isinstance(name, str) for name in ids):
        return f"must have at least one instruction, all of them strings; got {ids!r}"
    if len(ids) != len(settings) or not all(isinstance(one, dict) for one in settings):
        return (
            f"must have one object in kwargs for each of its {len(ids)} instructions; got "
            f"{settings!r}"
        )
    return None


def _require_scorer() -> None:
    try:
        import lm_eval.tasks.ifeval.utils  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"IFEval's scorer can't be imported ({error}); install the extra with "
            "pip install 'kvfold[eval]'"
        ) from error


def _check_scorable(task: HarnessTask, where: str, doc: Mapping[str, Any]) -> None:
    """Score an empty answer: that builds every instruction, and judges nothing."""
    try:
        task.harness.process_results(doc, [""])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EvaluationError(
            f"{where} must have instructions that the scorer knows, with their settings; got "
            f"{doc['instruction_id_list']} ({type(error).__name__}: {error})"
        ) from None
