"""GSM8K through lm-eval's `gsm8k`: grade-school arithmetic in 5 shots (Cobbe et al. 2021).

An answer is right under `strict-match` if it ends as the examples do (#### and the number), under
`flexible-extract` if its last number is the right one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvfold.evaluation.records import read_records
from kvfold.evaluation.tasks.harness import HarnessTask, data_files, require_harness
from kvfold.evaluation.tasks.settings import TaskSettings


def gsm8k(
    settings: TaskSettings, *, chat_template: bool = False, max_gen_toks: int | None = None
) -> HarnessTask:
    """The task on `gsm8k/test.jsonl`, its examples from `train.jsonl`, or on the hub's records.

    Raises `EvaluationError` naming a bad line.
    """
    files = data_files(settings, {n: f"gsm8k/{n}.jsonl" for n in ("train", "test")})
    fields = {"question": str, "answer": str}
    splits = {
        name: read_records(path, fields, what="question", complaint=_incomplete)
        for name, path in files.items()
    }
    require_harness()
    return HarnessTask(
        name="gsm8k",
        task="gsm8k",
        folder="gsm8k",
        splits=splits,
        files=files,
        chosen=settings,
        chunk=settings.batch,
        chat_template=chat_template or settings.chat_template,
        max_gen_toks=settings.answer_tokens if max_gen_toks is None else max_gen_toks,
    )


def _incomplete(record: Mapping[str, Any]) -> str | None:
    if not record["question"].strip():
        return "must have a question; got an empty one"
    if re.search(r"#### -?[.,]*[0-9][0-9.,]*\s*$", record["answer"]):
        return None
    return "must have an answer that ends in #### and a number"
