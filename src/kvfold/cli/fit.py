"""`kvfold fit`: fit an add-on to a frozen model and write it to a folder."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvfold.cli.options import (
    BytesPerTokenOption,
    DeviceOption,
    DtypeOption,
    ModelArgument,
    PlanOption,
    TimesSmallerOption,
    budget_plan,
    console,
    load_model,
    only_one,
    read_plan,
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
    "A plan of all three axes, as a file for --plan. Groups of layers share a code (depth), 4 "
    "tokens become one slot (sequence), slots are stored in 8 bits a value (bits). Layers that "
    "share a code go through the other axes together; a layer that no axis names stays as it "
    f"is.\n\n\b\n{EXAMPLE_PLAN}\n"
    "\b\nExamples:\n"
    "kvfold fit smollm2-135m --preset balanced --tokens 60000 -o my-addon\n"
    "kvfold fit smollm2-135m --times-smaller 8 -o my-addon\n"
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
            metavar="NAME", help="A plan by name (see kvfold inspect); `balanced` by default."
        ),
    ] = None,
    plan: PlanOption = None,
    times_smaller: TimesSmallerOption = None,
    bytes_per_token: BytesPerTokenOption = None,
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

    only_one(preset=preset, plan=plan, times_smaller=times_smaller, bytes_per_token=bytes_per_token)
    output = output.absolute() if output.name == "" else output
    _check_output(output, force=force)
    own_plan = None if plan is None else read_plan(plan)
    screen = console()
    began = time.perf_counter()
    loaded = load_model(model, dtype, device)
    shape = anatomy(loaded[0])
    chosen = own_plan or budget_plan(shape, times_smaller, bytes_per_token)
    chosen = chosen or _preset(preset or "balanced", shape)
    text = _Text(
        corpus, tokens, held_out_tokens, calibration_window(chosen, shape, window, gate_steps)
    )
    _describe(screen, chosen, shape, text.window)
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
    seconds = time.perf_counter() - began
    size = addon.parameter_bytes() / 1e6
    screen.print(f"Fitted in {seconds:.0f} s; {size:.1f} MB of weights written to {output}.")
    screen.print(f"Next: kvfold evaluate {model} --addon {output}", highlight=False)


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
