"""`kvfold evaluate`: what an add-on costs in quality and saves in bytes, beside the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvfold.cli.evaluate_tasks import evaluate_tasks
from kvfold.cli.options import (
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
    parse_lengths,
    say_plans,
    text_windows,
)
from kvfold.cli.suite_options import (
    LENGTHS,
    AnswerTokensOption,
    ChatTemplateOption,
    FailUnderOption,
    FractionOption,
    JobsOption,
    LimitOption,
    OutOption,
    PeersEnvOption,
    PeersOption,
    PeersSkipOption,
    ReuseOption,
    SomeAddOnsOption,
    SpeedLengthsOption,
    SuiteOptions,
    TasksOption,
    check_options,
    given,
)

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from kvfold.evaluation.prompt_runner import PromptEvaluation
    from kvfold.evaluation.runner import Evaluation
    from kvfold.runtime.attach import AddOnLike

WINDOW = 512
"""Tokens of a window of text."""

PROMPT = 2048
"""Tokens of a window before those that are scored, with --continuation."""

HELP = (
    "Measure add-ons against the plain model on the same text.\n\n"
    "Shows perplexity, divergence from the plain model, how much of the history's worth is "
    "kept, bytes (stored and in memory, in bits a value, and part by part at each length) and "
    "speed. The first row is always `no compression`.\n\n"
    "An add-on whose prompts skip layers has no logits for most of a prompt. With --continuation "
    "N each window's last N tokens are scored, after a prompt that ran as the plan says, and "
    "prefill is timed; with --prefill full it is measured without skipping.\n\n"
    "With --tasks the model answers whole benchmarks, add-on by add-on, into a run folder: a run "
    "that was broken off goes on where it was, `kvfold report` makes a page of it, and "
    "--fail-under ends with status 1 where a rule is not kept. --peers asks other projects' "
    "methods (kvpress, transformers' quantised cache) the same items, in an environment of their "
    "own that is made once.\n\n"
    "\b\nExamples:\n"
    "kvfold evaluate smollm2-135m --addon my-addon --data test.txt --windows 8 --window 512\n"
    "kvfold evaluate smollm2-135m --addon my-addon --data test.txt --continuation 128\n"
    "kvfold evaluate smollm2-135m --addon my-addon --tasks perplexity,needle --data folder "
    "--out results/run\n"
    "kvfold evaluate smollm2-135m --addon my-addon --tasks needle,ruler --data folder "
    "--peers snapkv=my-addon,kvzip@4x,quantized-4bit --out results/run"
)


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("evaluate", help=HELP)(evaluate_command)


def evaluate_command(
    context: typer.Context,
    model: ModelArgument,
    addon: SomeAddOnsOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Text to measure on, from its start; Python's held-out documentation by default. "
            "With --tasks the folder of data sets.",
        ),
    ] = None,
    tasks: TasksOption = None,
    out: OutOption = None,
    fraction: FractionOption = 1.0,
    limit: LimitOption = None,
    answer_tokens: AnswerTokensOption = None,
    chat_template: ChatTemplateOption = None,
    reuse: ReuseOption = None,
    peers: PeersOption = None,
    peers_env: PeersEnvOption = None,
    peers_skip: PeersSkipOption = None,
    jobs: JobsOption = 1,
    fail_under: FailUnderOption = None,
    speed_lengths: SpeedLengthsOption = "256,1k",
    windows: Annotated[int, typer.Option(min=1, help="Windows of text.")] = 8,
    window: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of each window of text; by default 512, or N and a prompt of 2,048 with "
            "--continuation N.",
        ),
    ] = None,
    continuation: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Score the last N tokens of each window, after the others."
        ),
    ] = None,
    history: Annotated[
        Literal["folded", "exact"],
        typer.Option(help="Fold in the same pass, or fold the history of an exact prefill."),
    ] = "folded",
    lengths: Annotated[
        str,
        typer.Option(
            metavar="N,N", help="Token counts to give bytes at, and with --tasks those of tasks."
        ),
    ] = LENGTHS,
    keep_window: KeepWindowOption = None,
    anchors: AnchorsOption = None,
    resident: ResidentOption = None,
    prefill: PrefillOption = None,
    replay: ReplayOption = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows in one forward pass.")] = 4,
    speed: Annotated[bool, typer.Option(help="Measure prefill and decode speed too.")] = True,
    speed_history: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompt length at which speed is measured (1,024, or the windows' own)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw quality against bytes, or a prompt's operations (png, svg, pdf).",
        ),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Measure and show; see HELP."""
    check_options(context, suite=tasks is not None)
    changes: dict[str, Any] = {
        "window": keep_window,
        "anchors": anchors,
        "resident": resident,
        "prefill": prefill,
        "replay": replay,
    }
    if tasks is not None:
        evaluate_tasks(
            SuiteOptions(
                model=model,
                addons=tuple(addon or ()),
                tasks=tasks,
                data=data,
                out=out,
                fraction=fraction,
                limit=limit,
                lengths=lengths if given(context, "lengths") else None,
                speed_lengths=speed_lengths if speed else None,
                seed=seed,
                batch=batch,
                reuse=reuse,
                fail_under=fail_under,
                json_file=json_file,
                changes=changes,
                dtype=dtype,
                device=device,
                peers=peers,
                peers_env=peers_env,
                peers_skip=peers_skip,
                answer_tokens=answer_tokens,
                chat_template=chat_template,
                jobs=jobs,
            )
        )
        return
    if not addon:
        raise typer.BadParameter("name at least one add-on to measure with --addon")
    import torch

    from kvfold.evaluation.candidates import with_plan
    from kvfold.evaluation.prompt_runner import PromptEvaluation, evaluate_prompts
    from kvfold.evaluation.report import plot_format
    from kvfold.evaluation.runner import check_seed

    chosen_lengths = parse_lengths(lengths)
    size = _window(window, continuation, history, speed_history)
    if plot is not None:
        plot_format(plot)
    check_seed(seed)
    torch.manual_seed(seed)
    screen = console()
    loaded, tokenizer = load_model(model, dtype, device)
    candidates = {
        name: with_plan(found, **changes) for name, found in load_addons(addon, loaded).items()
    }
    if continuation is None:
        _refuse_skipping(candidates)
    say_plans(screen, loaded, candidates)
    tokens = text_windows(data, tokenizer, window=size, windows=windows)
    config = {"model": model, "addons": list(addon), "data": data, "seed": seed}
    shared: dict[str, Any] = {"lengths": chosen_lengths, "speed": speed, "batch": batch}
    with screen.status("measuring") as status:
        shared["on_progress"] = lambda what: status.update(f"measuring: {what}")
        measured = (
            _evaluate(loaded, candidates, tokens, history, speed_history, shared)
            if continuation is None
            else evaluate_prompts(loaded, candidates, tokens, continuation, **shared)
        )
    files: dict[str, Any] = {"json_file": json_file, "plot": plot}
    if isinstance(measured, PromptEvaluation):
        show_prompts(screen, measured, config, **files, title=f"{model}: quality and prefill")
    else:
        show(screen, measured, config, **files, title=f"{model}: quality and bytes")
    for line in _warnings(candidates, tokens.shape[1], continuation):
        screen.print(line, style="yellow", highlight=False)


def _window(
    window: int | None, continuation: int | None, history: str, speed_history: int | None
) -> int:
    """Tokens of a window of text; `typer.BadParameter` if options don't go together."""
    if continuation is None:
        return window or WINDOW
    if window is not None and window <= continuation:
        raise typer.BadParameter(
            f"a window must hold a prompt before the --continuation of {continuation} tokens; got "
            f"--window {window}; lengthen it"
        )
    if history == "exact":
        raise typer.BadParameter(
            "with --continuation a prompt runs as the plan says, so there is no --history exact; "
            "leave it out"
        )
    if speed_history is not None:
        raise typer.BadParameter(
            "with --continuation prefill is timed at the windows' own prompts; leave "
            "--speed-history out, and set their length with --window"
        )
    return window or PROMPT + continuation


def _refuse_skipping(candidates: Mapping[str, AddOnLike]) -> None:
    skipping = [name for name, addon in candidates.items() if addon.plan.prefill == "skip"]
    if skipping:
        raise typer.BadParameter(
            f"{', '.join(skipping)}: most of a prompt skips the upper layers, so its own tokens "
            "have no logits to score. Add --continuation N to score the last N tokens of each "
            "window after a prompt that skips, or --prefill full to measure without skipping"
        )


def _evaluate(
    model: Any,
    candidates: Mapping[str, AddOnLike],
    tokens: Tensor,
    history: Literal["folded", "exact"],
    speed_history: int | None,
    shared: Mapping[str, Any],
) -> Evaluation:
    from kvfold.evaluation.runner import evaluate
    from kvfold.evaluation.speed import SpeedSettings

    settings = SpeedSettings() if speed_history is None else SpeedSettings(history=speed_history)
    return evaluate(model, candidates, tokens, history=history, speed_settings=settings, **shared)


def _warnings(
    candidates: Mapping[str, AddOnLike], window: int, continuation: int | None
) -> Iterator[str]:
    """What the windows were too short for."""
    from kvfold.evaluation.candidates import never_folds, skipped_tokens

    prompt = window - (continuation or 0)
    for name, addon in candidates.items():
        if never_folds(addon, window):
            yield (
                f"{name}: nothing was folded in windows of {window} tokens, so its quality is the "
                "plain model's. Take longer windows (--window) or keep fewer tokens exact "
                "(--keep-window)."
            )
        if addon.plan.prefill == "skip" and not skipped_tokens(addon.plan, prompt):
            yield (
                f"{name}: nothing was skipped in prompts of {prompt:,} tokens, of which the last "
                f"{addon.plan.replay:,} and the first {addon.plan.anchors} run through all layers "
                "anyway. Take longer windows (--window) or replay fewer tokens (--replay)."
            )


def show(
    screen: Console,
    made: Evaluation,
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
        write_plot,
    )

    for table in (quality_table(made), memory_table(made), component_table(made)):
        screen.print(table)
    data = report_data(made, config)
    write_files(screen, json_file, data, plot, lambda path: write_plot(path, made, title=title))


def show_prompts(
    screen: Console,
    made: PromptEvaluation,
    config: dict[str, Any],
    *,
    json_file: Path | None,
    plot: Path | None,
    title: str,
) -> None:
    """`show` for what was measured by continuations."""
    from kvfold.evaluation.prompt_report import prompt_points, prompt_table, write_prompt_plot
    from kvfold.evaluation.report import component_table, memory_table, report_data

    for table in (prompt_table(made), memory_table(made), component_table(made)):
        screen.print(table)

    def draw(path: Path) -> None:
        write_prompt_plot(path, made, prompt_points(made), title=title)

    write_files(screen, json_file, report_data(made, config), plot, draw)


def write_files(
    screen: Console,
    json_file: Path | None,
    data: Mapping[str, Any],
    plot: Path | None,
    draw: Callable[[Path], None],
) -> None:
    """Write figures and plot where they were asked for, and say where they are."""
    from kvfold.evaluation.report import write_json

    if json_file is not None:
        write_json(json_file, data)
        screen.print(f"Figures: {json_file}", highlight=False)
    if plot is not None:
        draw(plot)
        screen.print(f"Plot: {plot}", highlight=False)
