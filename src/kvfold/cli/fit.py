"""`kvfold fit`: fit an add-on to a frozen model and write it to a folder."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.cli.options import DeviceOption, DtypeOption, ModelArgument, console, load_model

HELP = (
    "Fit an add-on to a frozen model, in closed form, and write it to a folder.\n\n"
    "The model runs over the corpus once a stage; nothing but the add-on is left on disk. "
    "What was fitted, and how well it does on held-out text, is shown and kept in the "
    "add-on.\n\n"
    "Example: kvfold fit smollm2-135m --preset balanced --tokens 60000 -o my-addon"
)


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("fit", help=HELP)(fit_command)


def fit_command(
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the add-on.")
    ],
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="A plan by name; `balanced` by default.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plan of your own, YAML or JSON.")
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
    window: Annotated[int, typer.Option(min=2, help="Tokens of each calibration window.")] = 512,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the folder.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from an interrupted fit.")
    ] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Fit and save; see HELP."""
    if preset is not None and plan is not None:
        raise typer.BadParameter("give --preset or --plan, not both")
    output = output.absolute() if output.name == "" else output
    _check_output(output, force=force)
    screen = console()
    checkpoint = output.with_name(f"{output.name}.checkpoint")
    if not resume:
        _remove(checkpoint)
    began = time.perf_counter()
    addon = _fit(
        load_model(model, dtype, device), preset, plan, corpus,
        tokens, held_out_tokens, window, checkpoint,
    )  # fmt: skip
    addon.save_pretrained(output)
    _remove(checkpoint)
    screen.print(report_table(addon.report))
    seconds = time.perf_counter() - began
    size = addon.parameter_bytes() / 1e6
    screen.print(f"Fitted in {seconds:.0f} s; {size:.1f} MB of weights written to {output}.")
    screen.print(f"Next: kvfold evaluate {model} --addon {output}", highlight=False)


def _fit(
    loaded: tuple[Any, Any],
    preset_name: str | None,
    plan_file: Path | None,
    corpus: str | None,
    tokens: int,
    held_out_tokens: int,
    window: int,
    checkpoint: Path,
) -> Any:
    from kvfold.anatomy import anatomy
    from kvfold.fitting.corpus import calibration_windows
    from kvfold.fitting.fit import fit
    from kvfold.presets import preset

    model, tokenizer = loaded
    chosen = (
        read_plan(plan_file)
        if plan_file is not None
        else preset(preset_name or "balanced", anatomy(model))
    )
    chosen.check(anatomy(model))
    windows = calibration_windows(
        corpus, tokenizer, window=window, tokens=tokens, held_out_tokens=held_out_tokens
    )
    return fit(model, chosen, windows.train, windows.held_out, checkpoint=checkpoint)


def read_plan(path: Path) -> Any:
    """A plan from a YAML or JSON file; raises `PlanError` or `typer.BadParameter`."""
    from kvfold.plan import Plan

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"can't read the plan {path}: {error}") from None
    return Plan.from_yaml(text)


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
    """Held-out R^2 and attention-output cosine, a row for each layer that was fitted."""
    from rich import box
    from rich.table import Table

    caption = f"on {report.get('held_out_tokens', 0):,} held-out tokens"
    mean = report.get("mean_attention_cosine")
    if mean is not None:
        caption += f"; mean attention-output cosine {mean:.4f}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption=caption, caption_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("method")
    for heading in ("R² of keys", "R² of values", "attention cosine"):
        table.add_column(heading, justify="right")
    for layer, figures in report.get("layers", {}).items():
        keys = ("keys_r2", "values_r2", "attention_cosine")
        cells = ("-" if figures[key] is None else f"{figures[key]:.4f}" for key in keys)
        table.add_row(layer, figures["method"], *cells)
    return table


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
