"""`kvfold sweep`: which layer to skip prompts from, and how many tokens to replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvfold.cli.evaluate import write_files
from kvfold.cli.options import DeviceOption, DtypeOption, ModelArgument, console, load_model

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from kvfold.anatomy import Anatomy
    from kvfold.evaluation.prompt_runner import PromptEvaluation
    from kvfold.evaluation.sweep import Setting
    from kvfold.plan import Plan

HELP = (
    "Find where prompts can skip layers: quality against the prompt's compute.\n\n"
    "For each split, an add-on that regenerates all layers above it is fitted (all in one pass "
    "over the text), and read with every replay. Quality is the perplexity of what follows "
    "prompts of held-out text, beside the plain model's. The cheapest setting within 3% of it is "
    "marked. Fitted on the first nine tenths of the text, measured on the last.\n\n"
    "Example: kvfold sweep smollm2-135m --data text.txt --json sweep.json --plot sweep.png"
)

FIT_WINDOW = 1024
"""Tokens of a window of the text that is fitted on."""

FEW_PROMPTS = (
    "The held-out part of the text had {} of {} prompts. Give more text (--data) or take shorter "
    "prompts (--prompt)."
)


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("sweep", help=HELP)(sweep_command)


def sweep_command(
    model: ModelArgument,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Text to fit and to measure on, different parts of it; Python's documentation, "
            "which is short, by default.",
        ),
    ] = None,
    splits: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Layers that skipped tokens run through; by default about a third, a half and "
            "two thirds of the model's.",
        ),
    ] = None,
    replays: Annotated[
        str, typer.Option(metavar="N,N", help="Last tokens of a prompt that run through all.")
    ] = "128,256,512",
    method: Annotated[
        Literal["ced", "csa2"],
        typer.Option(
            help="Each upper layer from the hidden state at the split, or the first of each group, "
            "from which the others read."
        ),
    ] = "ced",
    state_projector: Annotated[
        Literal["both", "on", "off"] | None,
        typer.Option(
            help="Models with linear attention: predict the states of skipped tokens, or begin "
            "with the replay, or try both (the default)."
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 2048,
    continuation: Annotated[int, typer.Option(min=1, help="Tokens scored after it.")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure on.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to fit on.")] = 60_000,
    keep_window: Annotated[
        int, typer.Option("--keep-window", "--window", min=0, help="Last tokens kept exact.")
    ] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Prompts in one forward pass.")] = 1,
    speed: Annotated[bool, typer.Option(help="Measure seconds of a prompt too.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw quality against operations (png, svg, pdf)."),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Fit, measure and show; see HELP."""
    from kvfold.anatomy import anatomy
    from kvfold.evaluation.prompt_runner import evaluate_prompts
    from kvfold.evaluation.report import plot_format
    from kvfold.evaluation.sweep import sweep_candidates, sweep_plans, sweep_settings
    from kvfold.models import load_config

    if plot is not None:
        plot_format(plot)
    shape = anatomy(load_config(model))
    chosen = _splits(splits, shape)
    settings = sweep_settings(shape, chosen, _replays(replays, prompt), state_projector)
    plans = sweep_plans(shape, method, settings, window=keep_window)
    screen = console()
    loaded, tokenizer = load_model(model, dtype, device)
    train, windows = _texts(data, tokenizer, tokens, prompts, prompt + continuation)
    fitted = _fit(screen, loaded, plans, train)
    with screen.status("measuring") as status:
        made = evaluate_prompts(
            loaded,
            sweep_candidates(fitted, settings),
            windows,
            continuation,
            speed=speed,
            batch=batch,
            on_progress=lambda what: status.update(f"measuring: {what}"),
        )
    config = {
        "model": model,
        "data": data,
        "method": method,
        "splits": list(chosen),
        "window": keep_window,
        "fit_tokens": train.numel(),
    }
    title = f"{model}, {method}: tokens replayed after skipping from a split"
    _show(screen, made, settings, config, json_file=json_file, plot=plot, title=title)
    if len(windows) < prompts:
        screen.print(FEW_PROMPTS.format(len(windows), prompts), style="yellow", highlight=False)


def _splits(text: str | None, shape: Anatomy) -> tuple[int, ...]:
    from kvfold.evaluation.sweep import default_splits

    return default_splits(shape) if text is None else _numbers(text, "--splits")


def _replays(text: str, prompt: int) -> tuple[int, ...]:
    found = _numbers(text, "--replays")
    if found[-1] >= prompt:
        raise typer.BadParameter(
            f"--replays must be fewer tokens than the prompt's {prompt:,}, or nothing is skipped; "
            f"got {found[-1]:,}; lengthen the prompt (--prompt) or replay fewer"
        )
    return found


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Counts from `10,15,20`, in order; raises `typer.BadParameter`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(
            f"{option} takes whole numbers from 1 on, as 10,15,20; got {text!r}"
        )
    return tuple(sorted({int(part) for part in parts}))


def _texts(
    data: str | None, tokenizer: Any, tokens: int, prompts: int, size: int
) -> tuple[Tensor, Tensor]:
    """Windows to fit on and windows to measure on, from texts that don't overlap."""
    from kvfold.errors import CorpusError
    from kvfold.fitting.corpus import load_corpus, token_windows

    corpus = load_corpus(data, tokenizer)
    train = token_windows(corpus.train, tokenizer, window=min(FIT_WINDOW, tokens), tokens=tokens)
    try:
        return train, token_windows(corpus.held_out, tokenizer, window=size, tokens=prompts * size)
    except CorpusError as error:
        raise CorpusError(
            f"held-out part of {corpus.name}, to measure on (--prompt, --continuation): {error}"
        ) from None


def _fit(
    screen: Console, model: Any, plans: Mapping[int, Plan], train: Tensor
) -> Mapping[int, Any]:
    """An add-on for each split, from one pass over the text."""
    from kvfold.fitting.together import fit_together

    screen.print(
        f"Fitting splits {', '.join(map(str, plans))} on {train.numel():,} tokens",
        highlight=False,
    )
    made = fit_together(model, {str(split): plan for split, plan in plans.items()}, train)
    return {int(split): addon for split, addon in made.items()}


def _show(
    screen: Console,
    made: PromptEvaluation,
    settings: Sequence[Setting],
    config: dict[str, Any],
    *,
    json_file: Path | None,
    plot: Path | None,
    title: str,
) -> None:
    """Print the table and the verdict, and write the files that were asked for."""
    from kvfold.evaluation.prompt_report import prompt_table, write_prompt_plot
    from kvfold.evaluation.report import report_data
    from kvfold.evaluation.sweep import WITHIN, cheapest, sweep_points

    best = cheapest(made)
    name = None if best is None else best.name
    screen.print(prompt_table(made, marked=name))
    screen.print(_verdict(made), highlight=False)
    data = {**report_data(made, config), "within": WITHIN, "cheapest": name}

    def draw(path: Path) -> None:
        write_prompt_plot(path, made, sweep_points(made, settings), title=title)

    write_files(screen, json_file, data, plot, draw)


def _verdict(made: PromptEvaluation) -> str:
    """Which setting to take, in a line."""
    from kvfold.evaluation.sweep import WITHIN, cheapest, closest

    best = cheapest(made)
    if best is not None:
        faster = made.times_faster(best)
        timed = "" if faster is None else f", {faster:.2f}x faster"
        return (
            f"* cheapest within {100 * WITHIN:.0f}% of the plain model: {best.name} "
            f"({100 * best.perplexity_rise:+.2f}%, {100 * best.operations_left:.0f}% of the "
            f"operations{timed})"
        )
    near = closest(made)
    if near is None:
        return "Nothing was skipped: prompts must be longer than anchors and replay (--prompt)."
    return (
        f"No setting that skips is within {100 * WITHIN:.0f}% of the plain model; the closest is "
        f"{near.name} ({100 * near.perplexity_rise:+.2f}%). Try higher splits or longer replays."
    )
