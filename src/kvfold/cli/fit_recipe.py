"""`kvfold fit --recipe`: run a recipe's stages, and write the add-on with its model card.

Started by `torchrun` or `accelerate launch`, each process loads the model and takes its share of
the work; the first one alone writes and has something to say.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli.fit_output import check_output
from kvfold.cli.fit_report import (
    going_on,
    report_table,
    say_where,
    scanned_heads,
    stages_table,
    write_report,
)
from kvfold.cli.options import console, load_model

if TYPE_CHECKING:
    from kvfold.fitting.recipe import Recipe
    from kvfold.fitting.trackers import TrackerName
    from kvfold.fitting.workers import Workers
    from kvfold.store.addon import AddOn


@dataclass(frozen=True)
class RecipeOptions:
    """The command line. model, dtype: instead of the recipe's own, as it is then reported."""

    recipe: Path
    output: Path
    model: str | None
    data: Path | None
    log: Path | None
    track: TrackerName | None
    json_file: Path | None
    force: bool
    resume: bool
    dtype: str | None
    device: str | None
    shard: bool = False


def fit_recipe(options: RecipeOptions) -> None:
    """Run the recipe, save the add-on, and show what each stage brought."""
    from kvfold.anatomy import anatomy
    from kvfold.describe import describe
    from kvfold.fitting.json_lines import JsonLines
    from kvfold.fitting.recipe_checks import check_recipe
    from kvfold.fitting.shard_checks import check_sharded
    from kvfold.fitting.stages import run_recipe
    from kvfold.fitting.trackers import tracking
    from kvfold.fitting.work_folder import check_free, delete
    from kvfold.fitting.workers import Workers
    from kvfold.models import load_config

    check_output(options.output, force=options.force)
    recipe = read_recipe(options.recipe, options.model, options.dtype)
    device = options.device or recipe.device
    workers = Workers.join(cpu=device == "cpu")
    screen = console(quiet=not workers.first)
    began = time.perf_counter()
    shape = anatomy(load_config(recipe.model_name))
    plan = check_recipe(recipe, shape, options.data)
    if options.shard:
        check_sharded(recipe, plan, workers)
    screen.print(f"Recipe: {recipe.name}", highlight=False, markup=False)
    screen.print(f"Plan: {describe(plan, shape)}", highlight=False)
    work = options.output.with_name(f"{options.output.name}.work")
    if not options.resume and workers.first:
        if options.force:
            delete(work)
        check_free(work)
    model, tokenizer = _load(recipe, device, workers, shard=options.shard)
    workers.barrier()
    name, curves = options.output.name, options.output.with_name(f"{options.output.name}.curves")
    with (
        JsonLines(options.log if workers.first else None, go_on=options.resume) as lines,
        tracking(options.track if workers.first else None, name, curves) as track,
    ):

        def log(line: dict[str, Any]) -> None:
            lines.write(line)
            track(line)
            if line.get("event") == "go on":
                screen.print(going_on(line), highlight=False, markup=False)

        addon = run_recipe(
            recipe, model, tokenizer, work, data=options.data, log=log, workers=workers
        )
    workers.leave()
    if not workers.first:
        return
    card = _save(addon, recipe, options.output)
    delete(work)
    write_report(addon.report, options.json_file)
    _show_layers(screen, addon)
    screen.print(stages_table(addon.report))
    if not card:
        screen.print("The folder has a README.md of its own, so no model card was written.")
    seconds = time.perf_counter() - began
    say_where(screen, addon, options.output, seconds, recipe.model_name, needs_data=True)


def _load(recipe: Recipe, device: str | None, workers: Workers, *, shard: bool) -> tuple[Any, Any]:
    """The base model and its tokenizer; a sharded one never stands whole on an accelerator."""
    from kvfold.runtime.sharding import shard as spread

    own = workers.own_device(device)
    model, tokenizer = load_model(recipe.model_name, recipe.dtype, "cpu" if shard else own)
    if shard:
        spread(model, own or workers.device)
    return model, tokenizer


def read_recipe(path: Path, model: str | None, dtype: str | None) -> Recipe:
    """A recipe from a file, with another model and dtype where they are given."""
    from kvfold.fitting.recipe import Recipe

    read = Recipe.from_file(path)
    given = {"model": model, "dtype": dtype}
    changes = {key: value for key, value in given.items() if value is not None}
    return Recipe.from_dict({**read.to_dict(), **changes}) if changes else read


def _save(addon: AddOn, recipe: Recipe, output: Path) -> bool:
    from kvfold.models import base_licence
    from kvfold.store.card import save_with_card

    licence = base_licence(recipe.model_name)
    return save_with_card(addon, output, licence=licence, plot=_plot(addon, recipe.name))


def _show_layers(screen: Any, addon: AddOn) -> None:
    """The table of layers, and what stages said that belongs to it."""
    reports = {s["name"]: s["report"] for s in addon.report["stages"] if s["kept"]}
    if addon.report.get("layers"):
        gates = {"gates": reports["gates"]} if "gates" in reports else {}
        screen.print(report_table({**addon.report, **gates}))
    scanned = reports.get("closed-form", {}).get("state_projector")
    if scanned is not None:
        screen.print(scanned_heads(scanned), highlight=False)


def _plot(addon: AddOn, title: str) -> bytes | None:
    """Perplexity over bytes a token, a point for what each stage made; None without matplotlib."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return None
    from kvfold.budget import history_bytes, plain_history_bytes
    from kvfold.evaluation.plot import Point, quality_plot

    shape, figures = addon.base.anatomy, addon.report["held_out"]
    size = history_bytes(addon.plan, shape) / 1000
    dropped = history_bytes(addon.plan.without_history(), shape) / 1000
    points = [
        Point(f"after {stage['name']}  {stage['perplexity_after']:.2f}", size, at, "add-on")
        for stage in addon.report["stages"]
        if stage["kept"] and (at := stage["perplexity_after"]) is not None
    ]
    if dropped > 0:
        at = figures["dropped"]["perplexity"]
        points.append(Point(f"history dropped  {at:.2f}", dropped, at, "dropped"))
    return quality_plot(
        points,
        base_size=plain_history_bytes(shape) / 1000,
        base_perplexity=figures["base"]["perplexity"],
        title=" ".join(title.split()).replace("$", r"\$"),
        size_label="kB a token of history, all layers (16-bit)",
    )
