"""Tasks of lm-eval as tasks of the suite: on local files, otherwise the harness's own to the last.

Prompts, few-shot examples, filters and scores are what lm-eval's task of that name makes of the
records; only where the records come from is ours. Where no data folder is named they are the hub's,
by lm-eval's own loading. The first items of a file are taken for a
fraction or a limit, as `lm_eval --limit` does, so that its figures are on the same items. Rows
that are padded together may round differently from single ones, so a run with batch=1 is the one
that equals lm-eval's default to the bit.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvfold.errors import CorpusError, EvaluationError, MissingExtraError
from kvfold.evaluation.encoding import encode
from kvfold.evaluation.records import Record, file_digest
from kvfold.evaluation.tasks.files import DATA_VARIABLE, named_data, several_needed
from kvfold.evaluation.tasks.harness_hints import without_hints
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Item, Subject

Splits = Mapping[str, Sequence[Record]]
"""Records by the split of the harness's task that they are."""

LOG_PROBABILITY = "perplexity"
"""What the harness calls a log-probability that it later makes a perplexity of."""

OWN_TOKENS = 256
"""Most new tokens of an answer where a task of the harness names none."""

PROMPTS_LOOKED_AT = 32
"""To tell whether a tokenizer knows the language that a task is in."""


@dataclass(frozen=True)
class HarnessTask:
    """One task of lm-eval on local records.

    name: as on the command line. task: what lm-eval calls it, in the folder of its tasks `folder`.
    splits: checked records, none for the hub's. files: where they came from, by name. chunk: items
    answered together.
    chat_template: wrap prompts as lm-eval does with --apply_chat_template; needs a tokenizer in the
    settings. max_gen_toks: most new tokens of an answer, the task's own by default. scoring: what
    to hold while answers are scored.
    """

    name: str
    task: str
    folder: str
    splits: Splits
    files: Mapping[str, Path]
    chosen: TaskSettings
    chunk: int
    chat_template: bool = False
    max_gen_toks: int | None = None
    not_for_peers: str | None = None
    parts: Sequence[tuple[str, ...]] = ()
    scoring: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    def __post_init__(self) -> None:
        if self.chat_template and getattr(self.chosen.tokenizer, "chat_template", None) is None:
            raise EvaluationError(
                f"the task {self.name} with a chat template needs a tokenizer that has one; got "
                f"{type(self.chosen.tokenizer).__name__}; leave the chat template out"
            )
        if self.max_gen_toks is not None and self.max_gen_toks < 1:
            raise EvaluationError(f"max_gen_toks must be at least 1; got {self.max_gen_toks}")
        shots, examples = self.harness.config.num_fewshot or 0, self.splits.get("train", ())
        if self.splits and shots > len(examples):
            raise EvaluationError(
                f"{self.files['train']} must have at least {shots} records, which {self.name} "
                f"draws examples from; got {len(examples)}"
            )
        if self.chosen.tokenizer is not None:
            self._check_tokenizer(self.chosen.tokenizer)
        if self._generates and self.chosen.positions is not None:
            self._check_room(self.chosen.positions)

    @property
    def _generates(self) -> bool:
        return bool(self.harness.OUTPUT_TYPE == "generate_until")

    def _check_room(self, positions: int) -> None:
        """Raise `EvaluationError` where an answer leaves no room for its prompt."""
        new = (self.harness.config.generation_kwargs or {}).get("max_gen_toks", OWN_TOKENS)
        if new >= positions:
            raise EvaluationError(
                f"an answer to {self.name} may have {new} tokens, and this model holds {positions} "
                "with the prompt; let answers end earlier (--answer-tokens "
                f"{self.name}={max(1, positions // 2)}), or leave the task out"
            )

    def _check_tokenizer(self, tokenizer: Any) -> None:
        """Raise `EvaluationError` for one whose model could only be wrong, or can't be asked."""
        try:
            encode("\n".join(i["prompt"] for i in self._items[:PROMPTS_LOOKED_AT]), tokenizer)
        except CorpusError:
            raise EvaluationError(
                f"the task {self.name} must be in the model's language; the tokenizer does not "
                "know most words of its prompts; leave the task out on this model"
            ) from None
        if self._generates and getattr(tokenizer, "eos_token_id", None) is None:
            raise EvaluationError(
                f"the task {self.name} generates until a text's end and needs a tokenizer with an "
                "end token (eos_token); this model's has none; leave the task out, or add the "
                "token to the tokenizer's files"
            )

    @cached_property
    def harness(self) -> Any:
        """lm-eval's own task, with our records in it."""
        import lm_eval.tasks

        changes: dict[str, Any] = {"task": self.task}
        if self.splits:
            changes["custom_dataset"] = self._dataset
        folder = Path(lm_eval.tasks.__file__).parent / self.folder
        with without_hints("lm_eval"), self._from_hub():
            manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
            found = manager.load({"group": self.name, "task": [changes]})["tasks"][self.task]
        if self.max_gen_toks is not None:
            found.set_config("generation_kwargs", {"max_gen_toks": self.max_gen_toks}, update=True)
        return found

    @contextmanager
    def _from_hub(self) -> Iterator[None]:
        """Say what to do where the hub's records are wanted and can't be had."""
        try:
            yield
        except (OSError, ValueError) as error:
            if self.splits:
                raise
            raise EvaluationError(
                f"the task {self.name} reads a data folder, or else the hub, which gave nothing "
                f"({error}); name a folder with --data FOLDER or {DATA_VARIABLE}"
            ) from error

    def settings(self) -> Mapping[str, Any]:
        """What items, prompts and scores depend on, with digests of the data files.

        Of the hub's records, a digest of those that are asked.
        """
        import lm_eval
        from lm_eval.defaults import DEFAULT_OTHER_SEED

        template = self.chosen.tokenizer.chat_template if self.chat_template else None
        records: dict[str, Any] = {n: file_digest(path) for n, path in self.files.items()}
        if not self.splits:
            asked = json.dumps(self._items, sort_keys=True, default=str)
            records = {"hub": self.harness.config.dataset_path, "asked": _digest(asked)}
        return {
            "harness": f"lm-eval {lm_eval.__version__}",
            "task": self.task,
            "version": self.harness.VERSION,
            "shots": self.harness.config.num_fewshot or 0,
            "shots_seed": DEFAULT_OTHER_SEED,
            "generation": _plain(self.harness.config.generation_kwargs),
            "answers_cut_at": self.max_gen_toks,
            "chat_template": None if template is None else _digest(repr(template)),
            "files": records,
            "items": self._count,
            "batch": self.chosen.batch,
        }

    @property
    def _count(self) -> int:
        """How many items: the first, as `lm_eval --limit` counts them."""
        total = len(self.harness.eval_docs)
        whole = total if self.chosen.limit is None else min(total, self.chosen.limit)
        return math.ceil(whole * self.chosen.fraction)

    def items(self) -> Sequence[Item]:
        """Prompts with their records. Examples in them depend on an item's place, as in lm-eval."""
        return self._items

    @cached_property
    def _items(self) -> tuple[Item, ...]:
        from lm_eval.defaults import DEFAULT_OTHER_SEED

        self.harness.set_fewshot_seed(DEFAULT_OTHER_SEED)
        # The harness shows a progress bar that can't be turned off.
        with without_hints("lm_eval"), redirect_stderr(io.StringIO()):
            self.harness.build_all_requests(
                limit=self._count,
                apply_chat_template=self.chat_template,
                fewshot_as_multiturn=self.chat_template,
                chat_template=self._in_chat_template if self.chat_template else None,
            )
        return tuple(
            {"id": str(made.doc_id), "prompt": made.args[0], "doc": _plain(made.doc)}
            for made in self.harness.instances
        )

    def answers(self, subject: Subject, items: Sequence[Item]) -> Sequence[Answer]:
        """What lm-eval's requests and scorers make of the model on these items."""
        model = self._model(subject, items)
        requests = [
            self.harness.construct_requests(
                doc=item["doc"], ctx=item["prompt"], metadata=(self.task, int(item["id"]), 1)
            )
            for item in items
        ]
        ask = getattr(model, self.harness.OUTPUT_TYPE)
        for request, said in zip(requests, ask(requests, disable_tqdm=True), strict=True):
            request.resps.append(said)
        with self.scoring():
            return self._judged(items, requests)

    def _model(self, subject: Subject, items: Sequence[Item]) -> Any:
        """The subject as lm-eval sees it."""
        from kvfold.evaluation.tasks.harness_model import KvfoldLM
        from kvfold.evaluation.tasks.harness_peer import PeerLM

        if subject.peer is None:
            return KvfoldLM(
                subject.model, tokenizer=subject.tokenizer, batch_size=self.chosen.batch
            )
        questions = {item["prompt"]: self._question(item) for item in items}
        return PeerLM(subject.peer, subject.tokenizer, questions)

    def _question(self, item: Item) -> str:
        """The end of a prompt that asks, with what a chat template has behind it; empty where no
        examples stand before it."""
        asked, prompt = self.harness.doc_to_text(item["doc"]), item["prompt"]
        start = prompt.rfind(asked) if isinstance(asked, str) else -1
        examples = self.harness.config.num_fewshot and prompt[: max(start, 0)].strip()
        return prompt[start:] if examples else ""

    def _judged(self, items: Sequence[Item], requests: list[Any]) -> list[Answer]:
        # The harness has no other way to filter answers than as those of all its requests.
        part = copy.copy(self.harness)
        part._instances = requests
        part.apply_filters()
        return [
            Answer(item["id"], self._said(request), self._scores(request))
            for item, request in zip(items, requests, strict=True)
        ]

    def _said(self, request: Any) -> dict[str, Any]:
        target = self.harness.doc_to_target(request.doc)
        answer = request.resps[0]
        if self.harness.OUTPUT_TYPE == "loglikelihood":
            return {"target": target, "log_probability": answer[0], "greedy": answer[1]}
        kept = {name: found for name, found in request.filtered_resps.items() if found != answer}
        return {"target": target, "text": answer, **kept}

    def _scores(self, request: Any) -> dict[str, bool | float | list[bool]]:
        """By the harness's name of the metric, and of the filter where there is more than one."""
        scores: dict[str, bool | float | list[bool]] = {}
        for chosen, said in request.filtered_resps.items():
            for metric, value in self.harness.process_results(request.doc, [said]).items():
                if metric == LOG_PROBABILITY:
                    scores["log_probability"] = float(value)
                    continue
                name = metric if len(request.filtered_resps) == 1 else f"{metric},{chosen}"
                scores[name] = _right(value)
        return scores

    def summary(self, answers: Sequence[Answer]) -> Mapping[str, float]:
        """The perplexity of the targets, where the harness gives one."""
        made = self.harness.aggregation().get(LOG_PROBABILITY)
        if made is None or not answers:
            return {}
        return {LOG_PROBABILITY: float(made([a.scores["log_probability"] for a in answers]))}

    def _dataset(self, **_: Any) -> dict[str, Any]:
        return {split: _table(records) for split, records in self.splits.items()}

    def _in_chat_template(self, history: Any, **options: Any) -> str:
        from lm_eval.models.huggingface import HFLM

        who = SimpleNamespace(tokenizer=self.chosen.tokenizer, chat_template_args={})
        text: str = HFLM.apply_chat_template(who, history, **options)
        return text


def data_files(settings: TaskSettings, files: Mapping[str, str]) -> dict[str, Path]:
    """Files of the data folder, by split; none where no folder was named: then it is the hub's.

    files: their places in the folder, by split. One file that is named in its place is a task's
    own; raises `EvaluationError` for it where the task needs several.
    """
    folder = named_data(settings)
    if folder is None:
        return {}
    if not folder.is_file():
        return {split: folder / file for split, file in files.items()}
    if len(files) > 1:
        raise several_needed(folder, list(files.values()))
    return dict.fromkeys(files, folder)


def _table(records: Sequence[Record]) -> Any:
    """Records as the harness has them: a table whose columns are each of one type.

    Raises `EvaluationError` naming the first line that does not fit those before it.
    """
    from datasets import Dataset

    def made(count: int) -> Any:
        try:
            return Dataset.from_list([dict(record.data) for record in records[:count]])
        except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
            return error

    if not isinstance(found := made(len(records)), Exception):
        return found
    number = bisect_left(
        range(len(records)), True, key=lambda n: isinstance(made(n + 1), Exception)
    )
    where, why = records[number].where, " ".join(str(made(number + 1)).split())
    raise EvaluationError(
        f"{where} must have values of the same types as the lines before it; {why[:200]}; write "
        "each field alike on every line"
    )


def require_harness() -> None:
    """Raise `MissingExtraError` unless lm-eval can be imported."""
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"tasks of the evaluation harness need lm-eval, which can't be imported ({error}); "
            "install the extra with pip install 'kvfold[eval]'"
        ) from error


def _right(value: Any) -> bool | list[bool]:
    """A score of 0 or 1 in whatever type the harness has it, or a list of them."""
    if isinstance(value, list):
        return [bool(one) for one in value]
    assert value in (0, 1), f"accuracies of single answers are 0 or 1; got {value!r}"
    return bool(value)


def _plain(value: Any) -> Any:
    """A deep copy, so that nobody can change the harness's own."""
    return copy.deepcopy(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
