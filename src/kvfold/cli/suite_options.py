"""The options of `kvfold evaluate --tasks`, and what they come to as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.cli.options import MOST_DIGITS

LENGTHS = "1k,4k,16k"
TASKS = "perplexity, lambada, gsm8k, ifeval, needle, ruler, ruler-file, recall, turns, fidelity"
"""As the registry has them, which help does without: it brings torch."""

ONLY_WITH_TASKS = (
    *("out", "fraction", "limit", "answer_tokens", "chat_template", "reuse", "fail_under"),
    *("speed_lengths", "jobs", "peers", "peers_env", "peers_skip"),
)
ONLY_WITHOUT = ("windows", "window", "continuation", "history", "speed_history", "plot")
SomeAddOnsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--addon",
        metavar="DIR",
        help="Add-on folder, one that comes with kvfold, or hub id; may be repeated. With --tasks "
        "none is needed.",
    ),
]
TasksOption = Annotated[
    str | None,
    typer.Option(metavar="NAME,NAME", help=f"Tasks to answer, of {TASKS}."),
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Run folder, new or to go on in (--tasks).")
]
FractionOption = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, help="Share of each task's items, of those within --limit (--tasks)."
    ),
]
LimitOption = Annotated[
    str | None,
    typer.Option(
        metavar="N,TASK=N",
        help="Items of each task at most, and of single tasks: 200,gsm8k=20 (--tasks).",
    ),
]
AnswerTokensOption = Annotated[
    str | None,
    typer.Option(
        metavar="TASK=N",
        help="Most new tokens of an answer to gsm8k or ifeval, where lm-eval's own number takes "
        "too long: ifeval=512 (--tasks).",
    ),
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        metavar="TASK,TASK",
        help="Put prompts of gsm8k or ifeval into the tokenizer's chat template, examples as "
        "turns, as lm-eval does with --apply_chat_template --fewshot_as_multiturn (--tasks).",
    ),
]
ReuseOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of run folders: what was answered there with the same settings is copied "
        "(--tasks).",
    ),
]
FailUnderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Rules such as `lambada.acc: {max_drop: 0.02}`; status 1 if one is not kept.",
    ),
]
PeersOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Other projects' methods to ask as well (--tasks): snapkv, expected-attention, kvzip "
        "and streaming-llm as @4x (4 times smaller) or =ADDON (the bytes of that add-on); "
        "quantized-4bit, quantized-2bit; plain, plain-bf16, plain-fp32.",
    ),
]
PeersEnvOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Python environment of the peers, made there once; by default in kvfold's cache.",
    ),
]
PeersSkipOption = Annotated[
    str | None,
    typer.Option(metavar="TASK,TASK", help="Tasks that peers are not asked."),
]
JobsOption = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Processes that answer side by side, each with the model and its share of the "
        "threads (--tasks).",
    ),
]
SpeedLengthsOption = Annotated[
    str,
    typer.Option(metavar="N,N", help="Tokens of the prompts that are timed (--tasks)."),
]


@dataclass(frozen=True)
class SuiteOptions:
    """The command line. lengths: None for each task's own. speed_lengths: None for no times.

    changes: of the add-ons' plans; None stands for their own.
    """

    model: str
    addons: tuple[str, ...]
    tasks: str
    data: str | None
    out: Path | None
    fraction: float
    limit: str | None
    lengths: str | None
    speed_lengths: str | None
    seed: int
    batch: int
    reuse: Path | None
    fail_under: Path | None
    json_file: Path | None
    changes: Mapping[str, Any]
    dtype: str | None
    device: str | None
    peers: str | None = None
    peers_env: Path | None = None
    peers_skip: str | None = None
    answer_tokens: str | None = None
    chat_template: str | None = None
    jobs: int = 1

    def config(self) -> dict[str, Any]:
        """What `run.json` says of the command line."""
        changes = {key: value for key, value in self.changes.items() if value is not None}
        return {
            "model": self.model,
            "addons": list(self.addons),
            "tasks": names_in(self.tasks),
            "data": self.data,
            "fraction": self.fraction,
            "limit": self.limit,
            "lengths": self.lengths,
            "batch": self.batch,
            "plan_changes": changes,
            **({} if self.answer_tokens is None else {"answer_tokens": self.answer_tokens}),
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
            **({} if self.peers is None else {"peers": names_in(self.peers)}),
            **({} if self.peers_skip is None else {"peers_skip": names_in(self.peers_skip)}),
        }


def check_options(context: typer.Context, *, suite: bool) -> None:
    """Raise `typer.BadParameter` for options of the other way of measuring."""
    wrong = [name for name in (ONLY_WITHOUT if suite else ONLY_WITH_TASKS) if given(context, name)]
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise typer.BadParameter(
            f"{names} can't be given with --tasks; leave it out, or measure on a text without "
            "--tasks"
            if suite
            else f"{names} belongs to --tasks; name some tasks, or leave it out"
        )


def given(context: typer.Context, name: str) -> bool:
    """Whether an option stood on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def names_in(text: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_limits(text: str | None) -> tuple[int | None, dict[str, int]]:
    """The limit of all tasks and those of single ones; `typer.BadParameter` for other texts."""
    of_all, of_one = None, {}
    for part, name, number in _numbers(text, "--limit", "number of items", "200,gsm8k=20"):
        if name in of_one or (not name and of_all is not None):
            raise typer.BadParameter(f"--limit takes one number a task; got another one: {part!r}")
        if name:
            of_one[name] = number
        else:
            of_all = number
    return of_all, of_one


def parse_tokens(text: str | None) -> dict[str, int]:
    """Most new tokens of an answer, by task; `typer.BadParameter` for other texts."""
    found: dict[str, int] = {}
    for part, name, number in _numbers(text, "--answer-tokens", "number of tokens", "ifeval=512"):
        if not name or name in found:
            raise typer.BadParameter(f"--answer-tokens takes TASK=N, once a task; got {part!r}")
        found[name] = number
    return found


def _numbers(
    text: str | None, option: str, what: str, example: str
) -> Iterator[tuple[str, str, int]]:
    """Each part of `200,gsm8k=20`, its task ("" for none) and its number, from 1 on."""
    for part in names_in(text or ""):
        name, _, number = (piece.strip() for piece in part.rpartition("="))
        right = re.fullmatch(f"[0-9]{{1,{MOST_DIGITS}}}", number) and int(number)
        if not right or ("=" in part and not name):
            raise typer.BadParameter(
                f"{option} is a {what} from 1 on, TASK=NUMBER, or several of these with commas "
                f"between, such as {example}; got {part[:80]!r}"
            )
        yield part, name, int(number)
