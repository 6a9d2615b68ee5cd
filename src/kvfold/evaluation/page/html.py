"""The page of one or more runs: one HTML file that loads nothing from anywhere.

Jinja escapes every text. A content policy in the page forbids all hosts, and any script but the
page's own, whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from kvfold.evaluation.page import words
from kvfold.evaluation.page.charts import LayerPlot, Plot, layer_plot, quality_plot
from kvfold.evaluation.page.runs import Cell, Run, leaves, names_of
from kvfold.evaluation.tasks.registry import shown_name

COLOURS = 8
"""Colours of subjects; the page's style has as many, and further subjects begin anew."""


def render_page(runs: Sequence[Run], remarks: Sequence[str] = ()) -> str:
    """The whole page as text. remarks: of whoever makes it, at the top."""
    environment = Environment(
        loader=FunctionLoader(_part),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        value=words.value_text,
        interval=words.interval_text,
        change=words.change_text,
        verdict=words.verdict_text,
        size=words.bytes_text,
        seconds=words.seconds_text,
        raw=_raw,
        task_name=shown_name,
    )
    environment.filters["task_name"] = shown_name
    named = zip(names_of(runs), runs, strict=True)
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html.jinja").render(
        title=", ".join(dict.fromkeys(run.title for run in runs)),
        remarks=remarks,
        runs=[_view(number, *each) for number, each in enumerate(named, start=1)],
        style=_part("page.css"),
        script=script,
        script_digest=digest,
        colours=COLOURS,
    )


def _part(name: str) -> str:
    return files("kvfold.evaluation.page").joinpath(name).read_text(encoding="utf-8")


def _view(number: int, name: str, run: Run) -> dict[str, Any]:
    """What the template shows of a run."""
    numbers = {name: index for index, name in enumerate(run.subjects)}
    return {
        "number": number,
        "name": name,
        "run": run,
        "numbers": numbers,
        "headlines": run.headlines(),
        "sizes": run.sizes(),
        "plots": _plots(run, numbers),
        "unplotted": run.unplotted if run.sizes() else [],
        "layers": _layers(run, numbers),
        "needles": {name: _grid(cells) for name, cells in run.needles.items()},
        "tables": {task: run.metric_names(task) for task in run.metrics["tasks"]},
        "costs": run.cost.get("subjects", {}),
        "parts": _parts(run.cost),
        "figures": [
            (f"{what} › {path}", leaf)
            for what, data in (("metrics", run.metrics), ("cost", run.cost), ("run", run.about))
            for path, leaf in leaves(data)
        ],
    }


def _plots(run: Run, numbers: Mapping[str, int]) -> list[Plot]:
    known = run.sizes()
    if known is None:
        return []
    tokens, sizes = known
    made = (
        quality_plot(
            f"{shown_name(task)}: {metric}", run.figures(task, metric), sizes, tokens, numbers
        )
        for task, metric in run.headlines()
        if task not in run.unplotted
    )
    return [plot for plot in made if plot is not None]


def _layers(run: Run, numbers: Mapping[str, int]) -> list[LayerPlot]:
    return [
        layer_plot(f"{shown_name(task)}: {measure}", values, numbers)
        for (task, measure), values in run.layers().items()
    ]


def _grid(cells: Sequence[Cell]) -> dict[str, Any]:
    """Cells as rows of a table: depths down, lengths across; None where there is no answer."""
    lengths = sorted({cell.length for cell in cells})
    by_place = {(cell.depth, cell.length): cell for cell in cells}
    depths = sorted({cell.depth for cell in cells})
    rows = [(depth, [by_place.get((depth, length)) for length in lengths]) for depth in depths]
    return {"lengths": lengths, "rows": rows}


def _parts(cost: Mapping[str, Any]) -> list[str]:
    """Components of bytes that any subject has."""
    entries = (e for s in cost.get("subjects", {}).values() for e in s["memory"])
    return list(dict.fromkeys(part for entry in entries for part in entry["components"]))


def _raw(leaf: Any) -> str:
    """A value as JSON writes it, so that no digit is lost."""
    return leaf if isinstance(leaf, str) else json.dumps(leaf)
