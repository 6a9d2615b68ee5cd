"""LAMBADA through lm-eval's `lambada_openai`: the last word of a passage (Paperno et al. 2016).

`acc` is right if greedy decoding would give every token of the last word; `perplexity` is that of
last words, not of tokens.
"""

from __future__ import annotations

from kvfold.evaluation.lambada import read_passage_records
from kvfold.evaluation.tasks.harness import HarnessTask, data_files, require_harness
from kvfold.evaluation.tasks.settings import TaskSettings

BATCHES_OF_A_CHUNK = 8
"""An item takes one short forward, so a chunk of a few batches is soon done."""


def lambada(settings: TaskSettings, *, chat_template: bool = False) -> HarnessTask:
    """The task on `lambada/lambada_test.jsonl`, or on the hub's records.

    Raises `EvaluationError` naming a bad line.
    """
    files = data_files(settings, {"test": "lambada/lambada_test.jsonl"})
    splits = {name: read_passage_records(path) for name, path in files.items()}
    require_harness()
    return HarnessTask(
        name="lambada",
        task="lambada_openai",
        folder="lambada",
        splits=splits,
        files=files,
        chosen=settings,
        chunk=settings.batch * BATCHES_OF_A_CHUNK,
        chat_template=chat_template,
    )
