"""`kvfold generate`: one prompt through the plain and the folded model, side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.options import (
    AddOnOption,
    AnchorsOption,
    DeviceOption,
    DtypeOption,
    KeepWindowOption,
    ModelArgument,
    PrefillOption,
    ReplayOption,
    ResidentOption,
    console,
    load_addons,
    load_model,
    say_plans,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from kvfold.runtime.attach import AddOnLike

HELP = (
    "Answer one prompt with the plain and the folded model, side by side.\n\n"
    "The prompt goes through the tokenizer's chat template if it has one (--raw leaves it "
    "as it is). A prompt longer than anchors and window is needed for anything to be "
    "folded.\n\n"
    "Example: kvfold generate smollm2-135m --addon my-addon --prompt-file question.txt"
)


@dataclass(frozen=True)
class Answer:
    """One model's continuation, and what it took.

    skipped_tokens: of the prompt, those that did not run through all layers; replayed_tokens: its
    last ones, that did.
    """

    text: str
    new_tokens: int
    seconds: float
    cache_bytes: int
    skipped_tokens: int = 0
    replayed_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the whole time, the prompt's included."""
        return self.new_tokens / max(self.seconds, 1e-9)


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("generate", help=HELP)(generate_command)


def generate_command(
    model: ModelArgument,
    addon: AddOnOption,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the prompt.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    keep_window: KeepWindowOption = None,
    anchors: AnchorsOption = None,
    resident: ResidentOption = None,
    prefill: PrefillOption = None,
    replay: ReplayOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Generate and show; see HELP."""
    from kvfold.evaluation.candidates import with_plan

    text = read_prompt(prompt, prompt_file)
    loaded, tokenizer = load_model(model, dtype, device)
    changes = {"window": keep_window, "anchors": anchors, "resident": resident}
    addons = {
        name: with_plan(found, **changes, prefill=prefill, replay=replay)
        for name, found in load_addons(addon, loaded).items()
    }
    ids = encode_prompt(tokenizer, text, raw=raw)
    screen = console()
    say_plans(screen, loaded, addons)
    with screen.status("generating"):
        answers = answer_all(
            loaded, tokenizer, addons, ids,
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
        )  # fmt: skip
    screen.print(f"{ids.shape[1]} prompt tokens", style="dim", highlight=False)
    screen.print(side_by_side(answers, width=screen.width))
    for name, candidate in addons.items():
        for line in _warnings(candidate, ids.shape[1], max_new_tokens):
            screen.print(f"{name}: {line}", style="yellow", highlight=False)


def _warnings(addon: AddOnLike, prompt: int, new_tokens: int) -> Iterator[str]:
    """What a prompt was too short for."""
    from kvfold.evaluation.candidates import never_folds, skipped_tokens

    plan = addon.plan
    exact = plan.anchors + plan.window
    if never_folds(addon, prompt + new_tokens):
        yield (
            f"nothing was folded, since it keeps {exact} tokens exact. Give a longer prompt "
            "(--prompt-file), or keep fewer (--keep-window)."
        )
    if plan.prefill == "skip" and not skipped_tokens(plan, prompt):
        yield (
            f"the prompt was too short to skip anything: its last {plan.replay:,} tokens and first "
            f"{plan.anchors} run through all layers anyway. Give a longer prompt (--prompt-file), "
            "or replay fewer tokens (--replay)."
        )


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of the one of both that was given; raises `typer.BadParameter`."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give exactly one of --prompt and --prompt-file")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"can't read the prompt {prompt_file}: {error}") from None
    if not prompt or not prompt.strip():
        raise typer.BadParameter("the prompt is empty")
    return prompt


def encode_prompt(tokenizer: Any, text: str, *, raw: bool) -> Tensor:
    """Token ids, (1, seq): through the chat template if there is one and `raw` is false."""
    if raw or getattr(tokenizer, "chat_template", None) is None:
        encoded = tokenizer(text, return_tensors="pt")
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    ids: Tensor = encoded["input_ids"]
    return ids


def answer_all(
    model: Any,
    tokenizer: Any,
    addons: Mapping[str, AddOnLike],
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, Answer]:
    """The plain model's answer, then every add-on's, all from the same seed."""
    from kvfold.evaluation.runner import PLAIN

    runs: dict[str, AddOnLike | None] = {PLAIN: None, **addons}
    return {
        name: _answer(model, tokenizer, addon, ids, max_new_tokens, temperature, seed)
        for name, addon in runs.items()
    }


def _answer(
    model: Any,
    tokenizer: Any,
    addon: AddOnLike | None,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Answer:
    import torch

    from kvfold.anatomy import anatomy
    from kvfold.evaluation.candidates import skipped_tokens
    from kvfold.evaluation.speed import cache_maker
    from kvfold.runtime.feeding import cache_argument
    from kvfold.runtime.ledger import plain_bytes

    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {
        "do_sample": False, "temperature": None, "top_p": None, "top_k": None,
    }  # fmt: skip
    with cache_maker(model, addon) as new_cache, torch.no_grad():
        cache = new_cache()
        start = time.perf_counter()
        made = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=_padding(model, tokenizer),
            **{cache_argument(model): cache},
            **sampling,
        )
        seconds = time.perf_counter() - start
        if addon is None:
            size = plain_bytes(
                anatomy(model), cache.get_seq_length(), element_size=model.dtype.itemsize
            )
        else:
            size = cache.nbytes()
    prompt = ids.shape[1]
    fresh = made[0, prompt:]
    skipped = 0 if addon is None else skipped_tokens(addon.plan, prompt)
    return Answer(
        tokenizer.decode(fresh, skip_special_tokens=True),
        len(fresh),
        seconds,
        size.total,
        skipped,
        addon.plan.replay if addon is not None and skipped else 0,
    )


def _padding(model: Any, tokenizer: Any) -> int:
    """Any id will do where there is one row; named so that generation has nothing to guess."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, model.config.eos_token_id)
    return next((int(found) for found in candidates if isinstance(found, int)), 0)


def side_by_side(answers: Mapping[str, Answer], *, width: int) -> RenderableType:
    """One column an answer, with its cost below."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from kvfold.evaluation.report import readable_bytes

    table = Table(box=box.ROUNDED, width=width, show_footer=True)
    for name, answer in answers.items():
        footer = (
            f"{answer.new_tokens} tokens, {answer.tokens_per_second:.1f} tok/s\n"
            f"cache {readable_bytes(answer.cache_bytes)}"
        )
        if answer.skipped_tokens:
            footer += (
                f"\nprompt: {answer.skipped_tokens:,} tokens skipped, "
                f"{answer.replayed_tokens:,} replayed"
            )
        table.add_column(name, footer=Text(footer, style="dim"), ratio=1, overflow="fold")
    table.add_row(*(Text(_printable(answer.text.strip())) for answer in answers.values()))
    return table


def _printable(text: str) -> str:
    """The text without control characters, which could move the cursor or worse."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
