"""`kvfold fit`: fit an add-on to a frozen model and write it to a folder."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvfold.cli.inspect import layer_ranges
from kvfold.cli.options import (
    BytesPerTokenOption,
    DeviceOption,
    DtypeOption,
    ModelArgument,
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
    "kvfold fit smollm2-135m --plan plan.yaml --gate-steps 200 -o my-addon"
)

WINDOW = 512
"""Tokens of a calibration window where only maps are fitted."""


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("fit", help=HELP)(fit_command)


def fit_command(
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the add-on.")
    ],
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
    force: Annotated[bool, typer.Option("--force", help="Overwrite the folder.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from an interrupted fit.")
    ] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Fit and save; see HELP."""
    from kvfold.anatomy import anatomy
    from kvfold.models import load_config

    only_one(preset=preset, plan=plan, times_smaller=times_smaller, bytes_per_token=bytes_per_token)
    output = output.absolute() if output.name == "" else output
    _check_output(output, force=force)
    own_plan = None if plan is None else read_plan(plan)
    screen = console()
    began = time.perf_counter()
    shape = anatomy(load_config(model))
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
        _remove(checkpoint)
    addon = _fit(loaded, chosen, text, gate_steps, checkpoint)
    addon.save_pretrained(output)
    _remove(checkpoint)
    if addon.report.get("layers") or addon.report.get("gates"):
        screen.print(report_table(addon.report))
    else:
        screen.print("This plan has no weights, so there was nothing to fit.")
    if "state_projector" in addon.report:
        screen.print(scanned_heads(addon.report["state_projector"]), highlight=False)
    seconds = time.perf_counter() - began
    size = addon.parameter_bytes() / 1e6
    screen.print(f"Fitted in {seconds:.0f} s; {size:.1f} MB of weights written to {output}.")
    how = " --continuation 128" if chosen.prefill == "skip" else ""
    screen.print(f"Next: kvfold evaluate {model} --addon {output}{how}", highlight=False)


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


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse before the fit what could not be written after it."""
    if not output.exists():
        return
    if not output.is_dir():
        raise typer.BadParameter(f"{output} is a file; an add-on is a folder")
    if any(output.iterdir()):
        if not force:
            raise typer.BadParameter(f"{output} exists; choose another folder or add --force")
        if not (output / "addon.json").exists():
            raise typer.BadParameter(f"{output} holds something else than an add-on")


def report_table(report: dict[str, Any]) -> Any:
    """A row for each layer that was fitted: held-out R^2 and attention-output cosine, and the
    error of its gate in the first and last tenth of the training, if it has one."""
    from rich import box
    from rich.table import Table

    gates = report.get("gates", {}).get("error", {})
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), caption=_caption(report), caption_justify="left"
    )
    table.add_column("layer", justify="right")
    table.add_column("method")
    for heading in ("R² of keys", "R² of values", "attention cosine"):
        table.add_column(heading, justify="right")
    if gates:
        table.add_column("gate error, before", justify="right")
        table.add_column("after", justify="right")
    layers = report.get("layers", {})
    for layer in sorted({*layers, *gates.get("first", {})}, key=int):
        figures = layers.get(layer, {})
        cells = [figures.get(key) for key in ("keys_r2", "values_r2", "attention_cosine")]
        cells += [gates[part].get(layer) for part in ("first", "last") if gates]
        shown = ("-" if cell is None else f"{cell:.4f}" for cell in cells)
        table.add_row(layer, figures.get("method", ""), *shown)
    return table


def scanned_heads(report: dict[str, Any]) -> str:
    """How many heads' states are scanned over skipped tokens, layer by layer, in a line."""
    by_count: dict[int, list[int]] = {}
    for layer, count in report["scanned"].items():
        by_count.setdefault(count, []).append(int(layer))
    parts = [
        f"{count} in layer{'s' if len(layers) > 1 else ''} {layer_ranges(layers)}"
        for count, layers in by_count.items()
    ]
    return (
        f"States over skipped tokens: of {report['heads']} heads a layer, scanned are "
        f"{'; '.join(parts)}. The others forget them while the replay runs."
    )


def _caption(report: dict[str, Any]) -> str:
    caption = f"on {report.get('held_out_tokens', 0):,} held-out tokens"
    mean = report.get("mean_attention_cosine")
    if mean is not None:
        caption += f"; mean attention-output cosine {mean:.4f}"
    gates = report.get("gates")
    if gates:
        caption += (
            f"; gates trained for {gates['steps']} steps: squared error of the layer's output "
            "relative to its size, on the training text, mean of the first and last tenth"
        )
    return caption


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
