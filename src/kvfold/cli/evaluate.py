"""`kvfold evaluate`: what an add-on costs in quality and saves in bytes, beside the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvfold.cli.options import (
    AddOnOption,
    AnchorsOption,
    DeviceOption,
    DtypeOption,
    KeepWindowOption,
    ModelArgument,
    ResidentOption,
    console,
    load_addons,
    load_model,
    parse_lengths,
    say_plans,
    text_windows,
)

HELP = (
    "Measure add-ons against the plain model on the same text.\n\n"
    "Shows perplexity, divergence from the plain model, how much of the history's worth is "
    "kept, bytes (stored and in memory, in bits a value, and part by part at each length) and "
    "speed. The first row is always `no compression`.\n\n"
    "Example: kvfold evaluate smollm2-135m --addon my-addon --data test.txt --windows 8 "
    "--window 512"
)


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("evaluate", help=HELP)(evaluate_command)


def evaluate_command(
    model: ModelArgument,
    addon: AddOnOption,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Text to measure on, from its start; Python's held-out documentation by default.",
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text.")] = 8,
    window: Annotated[int, typer.Option(min=2, help="Tokens of each window of text.")] = 512,
    history: Annotated[
        Literal["folded", "exact"],
        typer.Option(help="Fold in the same pass, or fold the history of an exact prefill."),
    ] = "folded",
    lengths: Annotated[
        str, typer.Option(metavar="N,N", help="Token counts to give bytes at.")
    ] = "1k,4k,16k",
    keep_window: KeepWindowOption = None,
    anchors: AnchorsOption = None,
    resident: ResidentOption = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows in one forward pass.")] = 4,
    speed: Annotated[bool, typer.Option(help="Measure prefill and decode speed too.")] = True,
    speed_history: Annotated[
        int, typer.Option(min=1, help="Prompt length at which speed is measured.")
    ] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw quality against bytes (png, svg, pdf)."),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Measure and show; see HELP."""
    import torch

    from kvfold.evaluation.candidates import never_folds, with_plan
    from kvfold.evaluation.report import plot_format
    from kvfold.evaluation.runner import evaluate
    from kvfold.evaluation.speed import SpeedSettings

    chosen_lengths = parse_lengths(lengths)
    if plot is not None:
        plot_format(plot)
    torch.manual_seed(seed)
    screen = console()
    loaded, tokenizer = load_model(model, dtype, device)
    candidates = {
        name: with_plan(found, window=keep_window, anchors=anchors, resident=resident)
        for name, found in load_addons(addon, loaded).items()
    }
    say_plans(screen, loaded, candidates)
    tokens = text_windows(data, tokenizer, window=window, windows=windows)
    with screen.status("measuring") as status:
        made = evaluate(
            loaded,
            candidates,
            tokens,
            history=history,
            lengths=chosen_lengths,
            speed=speed,
            speed_settings=SpeedSettings(history=speed_history),
            batch=batch,
            on_progress=lambda what: status.update(f"measuring: {what}"),
        )
    config = {"model": model, "addons": list(addon), "data": data, "seed": seed}
    show(screen, made, config, json_file=json_file, plot=plot, title=f"{model}: quality and bytes")
    for name, candidate in candidates.items():
        if never_folds(candidate, tokens.shape[1]):
            screen.print(
                f"{name}: nothing was folded in windows of {tokens.shape[1]} tokens, so its "
                "quality is the plain model's. Take longer windows (--window) or keep fewer "
                "tokens exact (--keep-window).",
                style="yellow",
                highlight=False,
            )


def show(
    screen: Any,
    made: Any,
    config: dict[str, Any],
    *,
    json_file: Path | None,
    plot: Path | None,
    title: str,
) -> None:
    """Print the tables and write the files that were asked for."""
    from kvfold.evaluation.report import (
        component_table,
        memory_table,
        quality_table,
        report_data,
        write_json,
        write_plot,
    )

    screen.print(quality_table(made))
    screen.print(memory_table(made))
    screen.print(component_table(made))
    if json_file is not None:
        write_json(json_file, report_data(made, config))
        screen.print(f"Figures: {json_file}", highlight=False)
    if plot is not None:
        write_plot(plot, made, title=title)
        screen.print(f"Plot: {plot}", highlight=False)
