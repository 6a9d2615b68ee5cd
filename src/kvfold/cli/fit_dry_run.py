"""`kvfold fit --recipe FILE --dry-run`: what every stage takes, before anything is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli.options import console

if TYPE_CHECKING:
    from kvfold.fitting.dry_world import Place
    from kvfold.fitting.machine import Machine
    from kvfold.fitting.predict import Prediction
    from kvfold.fitting.recipe import Recipe

SHOWN = 4
"""Components of a stage in the table, the largest ones."""


@dataclass(frozen=True)
class DryRunOptions:
    """The command line. model, dtype, device, memory_limit: instead of the recipe's own.

    machine, operations_per_second: what time is worked out for, if not for the machine at hand.
    """

    recipe: Path
    model: str | None
    json_file: Path | None
    dtype: str | None
    device: str | None
    memory_limit: str | None
    machine: str | None
    operations_per_second: float | None


def dry_run(options: DryRunOptions) -> None:
    """Predict, show, write, and raise `MemoryLimitError` if it is too much."""
    import torch

    from kvfold.cli.fit_recipe import read_recipe
    from kvfold.cli.fit_report import write_report
    from kvfold.fitting.predict import predict
    from kvfold.fitting.sizes import parse_bytes
    from kvfold.models import load_config

    recipe = read_recipe(options.recipe, options.model, options.dtype)
    place = _place(options.device or recipe.device)
    dtype = recipe.dtype or ("float32" if place == "cpu" else "bfloat16")
    config = load_config(recipe.model_name)
    prediction = predict(recipe, config, place, getattr(torch, dtype))
    machine = _machine(options, prediction)
    given = options.memory_limit or recipe.memory_limit
    limit = None if given is None else parse_bytes(given)
    _show(prediction, machine, recipe)
    write_report(prediction.to_dict(machine, limit), options.json_file)
    if limit is not None:
        prediction.require(limit)


def _place(device: str | None) -> Place:
    import torch

    found = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return "cpu" if found.startswith("cpu") else "cuda"


def _machine(options: DryRunOptions, prediction: Prediction) -> Machine | None:
    """What time is worked out for; None where the device is not here and none was named."""
    import torch

    from kvfold.fitting.machine import machine_of_rate, measured_machine, named_machine

    if options.operations_per_second is not None:
        return machine_of_rate(options.operations_per_second)
    if options.machine is not None:
        return named_machine(options.machine)
    if prediction.place == "cuda" and not torch.cuda.is_available():
        return None
    return measured_machine(
        torch.device(prediction.place), [stage.work for stage in prediction.stages]
    )


def _show(prediction: Prediction, machine: Machine | None, recipe: Recipe) -> None:
    from kvfold.evaluation.report import bare_table
    from kvfold.fitting.predict import BESIDE
    from kvfold.fitting.sizes import shown_bytes

    screen = console()
    screen.print(f"Recipe: {recipe.name}", highlight=False, markup=False)
    said = "time is not known: name a --machine"
    if machine is not None:
        said = f"time: {machine.assumption}"
    table = bare_table(
        caption=(
            f"on {prediction.place} in {prediction.dtype}: {shown_bytes(prediction.base_bytes)} of "
            f"base weights, {prediction.addon_values:,} add-on values; peaks are of tensors, with "
            f"about {shown_bytes(BESIDE[prediction.place])} beside them; {said}"
        )
    )
    table.add_column("stage")
    table.add_column("peak", justify="right")
    table.add_column("largest parts", overflow="fold")
    table.add_column("operations", justify="right")
    table.add_column("time", justify="right")
    for stage in prediction.stages:
        parts = list(stage.components.items())[:SHOWN]
        table.add_row(
            stage.name,
            shown_bytes(stage.peak_bytes),
            ", ".join(f"{name} {shown_bytes(size)}" for name, size in parts),
            f"{stage.work.total:.2g}" if stage.whole else "-",
            _time(stage.seconds(machine)),
        )
    screen.print(table)


def _time(seconds: float | None) -> Any:
    if seconds is None:
        return "-"
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
