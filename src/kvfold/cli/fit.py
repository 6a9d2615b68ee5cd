"""`kvfold fit`: fit an add-on to a frozen model and write it to a folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from kvfold.cli.fit_output import check_output, remove
from kvfold.cli.fit_report import report_table, say_where, scanned_heads, write_report
from kvfold.cli.options import (
    BytesPerTokenOption,
    DeviceOption,
    DtypeOption,
    PlanOption,
    PrefillOption,
    ReplayOption,
    TimesSmallerOption,
    budget_plan,
    console,
    load_model,
    only_one,
    read_plan,
    with_keys,
)

if TYPE_CHECKING:
    from kvfold.anatomy import Anatomy
    from kvfold.plan import Plan

EXAMPLE_PLAN = """\
anchors: 4
window: 128
depth:
  - {method: latent, layers: [0, 1, 2, 3, 4], rank: 480}
  - {method: latent, layers: [5, 6, 7], rank: 288}
sequence:
  - {method: pool, layers: [0, 1, 2, 3, 4, 5, 6, 7], group: 4, gate: head}
bits:
  - {method: turboquant, layers: [0, 1, 2, 3, 4, 5, 6, 7], key_bits: 8}
"""

HELP = (
    "Fit an add-on to a frozen model and write it to a folder.\n\n"
    "What is folded, and how, comes from a preset, a budget or a plan of your own. Maps are "
    "fitted in closed form, in one pass over the corpus a stage; the gates of a plan that pools "
    "tokens are then trained, a window of text a step. Nothing but the add-on is left on disk. "
    "How well it does on held-out text is shown and kept in the add-on.\n\n"
    "With --recipe FILE everything comes from one YAML or JSON file: model, plan, texts, and the "
    "stages of the training in order. Each stage is measured on held-out text, and one that made "
    "it worse is not kept. A text whose source is ${DATA}/NAME is in the folder that --data names. "
    "The add-on gets a model card. An interrupted run goes on with --resume. Started by torchrun "
    "or accelerate launch, several processes share the work. With --dry-run nothing is run: what "
    "memory and time each stage takes is told from the configuration alone.\n\n"
    "With --prefill skip most of a prompt runs through the lower layers only; the last tokens "
    "(--replay) run through all. --state-projector is for models with linear attention.\n\n"
    "A plan of all three axes, as a file for --plan. Groups of layers share a code (depth), 4 "
    "tokens become one slot (sequence), slots are stored in 8 bits a value (bits). Layers that "
    "share a code go through the other axes together; a layer that no axis names stays as it "
    f"is.\n\n\b\n{EXAMPLE_PLAN}\n"
    "\b\nExamples:\n"
    "kvfold fit smollm2-135m --preset balanced --tokens 60000 -o my-addon\n"
    "kvfold fit smollm2-135m --times-smaller 8 -o my-addon\n"
    "kvfold fit smollm2-135m --preset ced --prefill skip --replay 256 -o my-addon\n"
    "kvfold fit smollm2-135m --plan plan.yaml --gate-steps 200 -o my-addon\n"
    "kvfold fit --recipe recipe.yaml --data my-texts --log run.jsonl -o my-addon\n"
    "kvfold fit --recipe recipe.yaml --dry-run --memory-limit 24GiB"
)

WINDOW = 512
"""Tokens of a calibration window where only maps are fitted."""

SAID_BY_RECIPES = (
    "preset",
    "plan",
    "times_smaller",
    "bytes_per_token",
    "prefill",
    "replay",
    "state_projector",
    "corpus",
    "tokens",
    "held_out_tokens",
    "window",
    "gate_steps",
)

OF_DRY_RUNS = ("memory_limit", "machine", "operations_per_second")
NOT_OF_DRY_RUNS = ("output", "log", "resume", "force", "shard")


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("fit", help=HELP)(fit_command)


def fit_command(
    context: typer.Context,
    output: Annotated[
        Path | None,
        typer.Option("--output", "--out", "-o", metavar="DIR", help="Folder for the add-on."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="smollm2-135m or default (embedded), tiny-hybrid (trained on a made-up language), "
            "a folder or a hub id. With a recipe, instead of its own.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Everything from one file; see training/recipes."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="What ${DATA} stands for in a recipe's texts."),
    ] = None,
    dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what memory and time a recipe's stages take."),
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Fail a dry run that needs more, such as 24GiB."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Work out a dry run's time for a GPU, as rtx-4090."),
    ] = None,
    operations_per_second: Annotated[
        float | None,
        typer.Option(min=1, metavar="RATE", help="Work it out for a rate, instead."),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a recipe's progress here, as JSON lines."),
    ] = None,
    track: Annotated[
        Literal["tensorboard", "trackio"] | None,
        typer.Option(help="Draw a recipe's progress as curves, with an extra of that name."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the add-on's report here too."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A plan by name (see kvfold inspect); by default `balanced`, or `ced` where "
            "prompts skip layers.",
        ),
    ] = None,
    plan: PlanOption = None,
    times_smaller: TimesSmallerOption = None,
    bytes_per_token: BytesPerTokenOption = None,
    prefill: PrefillOption = None,
    replay: ReplayOption = None,
    state_projector: Annotated[
        bool | None,
        typer.Option(
            "--state-projector/--no-state-projector",
            help="Fit what the states of skipped linear-attention layers are predicted from, "
            "instead of the plan's way.",
        ),
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Text file, folder, JSON lines or hub:NAME; Python's documentation by default.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to fit on.")] = 60_000,
    held_out_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that the report is measured on.")
    ] = 4_096,
    window: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of each calibration window; by default 512, or at least 1,024 where "
            "gates are trained.",
        ),
    ] = None,
    gate_steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps that pooling gates are trained for, if not as many as usual."
        ),
    ] = None,
    shard: Annotated[
        bool,
        typer.Option(
            "--shard",
            help="Spread the base model's layers over the processes of a recipe that torchrun or "
            "accelerate started (FSDP), for models that one device has no room for.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the folder.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from an interrupted fit.")
    ] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Fit and save; see HELP."""
    if dry:
        from kvfold.cli.fit_dry_run import DryRunOptions, dry_run

        _refuse_given(context, (*SAID_BY_RECIPES, *NOT_OF_DRY_RUNS), "is not for a dry run")
        if recipe is None:
            raise typer.BadParameter("a --dry-run is of a --recipe FILE; name one")
        given = (dtype, device, memory_limit, machine, operations_per_second)
        dry_run(DryRunOptions(recipe, model, json_file, *given))
        return
    _refuse_given(context, OF_DRY_RUNS, "is for a --dry-run")
    if output is None:
        raise typer.BadParameter("name the folder for the add-on with --out DIR")
    output = output.absolute() if output.name == "" else output
    if recipe is not None:
        from kvfold.cli.fit_recipe import RecipeOptions, fit_recipe

        _refuse_given(context, SAID_BY_RECIPES, "is said by the recipe; change it there")
        fit_recipe(
            RecipeOptions(
                recipe,
                output,
                model,
                data,
                log,
                track,
                json_file,
                force,
                resume,
                dtype,
                device,
                shard,
            )
        )
        return
    _refuse_given(context, ("data", "log", "track", "shard"), "is for --recipe FILE")
    if model is None:
        raise typer.BadParameter("name a MODEL, or a --recipe FILE that does")
    only_one(preset=preset, plan=plan, times_smaller=times_smaller, bytes_per_token=bytes_per_token)
    check_output(output, force=force)
    own_plan = None if plan is None else read_plan(plan)
    screen = console()
    began = time.perf_counter()
    shape = _shape(model)
    chosen = own_plan or budget_plan(shape, times_smaller, bytes_per_token)
    usual = "ced" if prefill == "skip" or state_projector else "balanced"
    chosen = chosen or _preset(preset or usual, shape)
    chosen = with_keys(
        chosen, shape, prefill=prefill, replay=replay, state_projector=state_projector
    )
    text = _Text(
        corpus, tokens, held_out_tokens, calibration_window(chosen, shape, window, gate_steps)
    )
    _describe(screen, chosen, shape, text.window)
    loaded = load_model(model, dtype, device)
    checkpoint = output.with_name(f"{output.name}.checkpoint")
    if not resume:
        remove(checkpoint)
    addon = _fit(loaded, chosen, text, gate_steps, checkpoint)
    addon.save_pretrained(output)
    remove(checkpoint)
    _show(screen, addon, json_file)
    seconds = time.perf_counter() - began
    say_where(screen, addon, output, seconds, model, needs_data=corpus is not None)


def _refuse_given(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Raise `typer.BadParameter` for an option that was given on the command line."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name.replace('_', '-')} {why}")


def _show(screen: Console, addon: Any, json_file: Path | None) -> None:
    if addon.report.get("layers") or addon.report.get("gates"):
        screen.print(report_table(addon.report))
    else:
        screen.print("This plan has no weights, so there was nothing to fit.")
    if "state_projector" in addon.report:
        screen.print(scanned_heads(addon.report["state_projector"]), highlight=False)
    write_report(addon.report, json_file)


def _shape(model: str) -> Anatomy:
    from kvfold.anatomy import anatomy
    from kvfold.models import load_config

    return anatomy(load_config(model))


@dataclass(frozen=True)
class _Text:
    """What a fit reads: tokens in windows of `window` each."""

    corpus: str | None
    tokens: int
    held_out_tokens: int
    window: int


def _preset(name: str, shape: Anatomy) -> Plan:
    from kvfold.presets import preset

    return preset(name, shape)


def calibration_window(
    plan: Plan, shape: Anatomy, named: int | None, gate_steps: int | None
) -> int:
    """Tokens of a calibration window: as named, else long enough for what is fitted.

    Raises `PlanError` if the plan does not fit, `typer.BadParameter` for settings that can't be.
    """
    import torch

    from kvfold.fitting.gates import LEAST_SEQ, trainable
    from kvfold.methods import build_pipelines

    with torch.device("meta"):
        gated = trainable(build_pipelines(plan, shape))
    if not gated:
        if gate_steps is not None:
            raise typer.BadParameter(
                "--gate-steps is for plans that pool tokens by a trained gate; this one has none"
            )
        return named or WINDOW
    exact = plan.anchors + plan.window + max(pipeline.group for pipeline in gated)
    if named is None:
        return max(LEAST_SEQ, (-(-exact // WINDOW) + 1) * WINDOW)
    if named <= exact:
        raise typer.BadParameter(
            f"gates are trained on the history, and windows of {named} tokens have none behind "
            f"{plan.anchors} anchors and a window of {plan.window}; take a --window of "
            f"{LEAST_SEQ} or more"
        )
    return named


def _describe(screen: Console, plan: Plan, shape: Anatomy, window: int) -> None:
    """Say what will be fitted, and warn where gates would see too little history."""
    from kvfold.describe import describe
    from kvfold.fitting.gates import LEAST_SEQ

    screen.print(f"Plan: {describe(plan, shape)}", highlight=False)
    if plan.sequence and window < LEAST_SEQ:
        screen.print(
            f"Windows of {window} tokens give gates little history to be trained on; "
            f"{LEAST_SEQ:,} or more are better (--window).",
            style="yellow",
            highlight=False,
        )


def _fit(
    loaded: tuple[Any, Any], plan: Plan, text: _Text, gate_steps: int | None, checkpoint: Path
) -> Any:
    from kvfold.fitting.corpus import calibration_windows
    from kvfold.fitting.fit import fit
    from kvfold.fitting.gates import GateSettings

    model, tokenizer = loaded
    windows = calibration_windows(
        text.corpus,
        tokenizer,
        window=text.window,
        tokens=text.tokens,
        held_out_tokens=text.held_out_tokens,
    )
    gates = None if gate_steps is None else GateSettings(steps=gate_steps)
    return fit(model, plan, windows.train, windows.held_out, gates=gates, checkpoint=checkpoint)
