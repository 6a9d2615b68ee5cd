"""The table and the plot of candidates that were measured by what follows a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from kvfold.evaluation.plot import Point, quality_plot
from kvfold.evaluation.prompt_runner import PromptEvaluation, PromptResult
from kvfold.evaluation.report import bare_table, plot_format, write_atomically


def prompt_table(made: PromptEvaluation, *, marked: str | None = None) -> Table:
    """One row a candidate: quality of the continuation, and what the prompt cost.

    marked: the name of a row to set off by a star.
    """
    timed = made.results[0].speed is not None
    table = bare_table(
        caption=f"PPL of the {made.continuation:,} tokens after a prompt of {made.prompt:,}, "
        f"{_counted(made.windows, 'window')}; rise: over the plain model's, ± the standard error "
        "of the windows' differences in loss; operations: share of the layers' work on the prompt"
        + ("; prefill: of one prompt, interleaved medians" if timed else "")
    )
    table.add_column("", overflow="fold", min_width=14, max_width=44)
    for heading in ("PPL", "rise", "operations\nleft"):
        table.add_column(heading, justify="right", no_wrap=True)
    if timed:
        table.add_column("prefill\nseconds", justify="right")
        table.add_column("times\nfaster", justify="right")
    for result in made.results:
        is_marked = result.name == marked
        name = f"* {result.name}" if is_marked else result.name
        table.add_row(name, *_cells(made, result), style="bold" if is_marked else None)
    return table


def _cells(made: PromptEvaluation, result: PromptResult) -> list[str]:
    cells = [f"{result.perplexity:.2f}", _rise(result), f"{100 * result.operations_left:.0f}%"]
    seconds, faster = result.prefill_seconds, made.times_faster(result)
    if seconds is not None and faster is not None:
        cells += [f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.3f}", f"{faster:.2f}x"]
    return cells


def _rise(result: PromptResult) -> str:
    if result.plan is None:
        return "-"
    error = result.perplexity_rise_error
    known = "" if error is None else f" ± {100 * error:.2f}"
    return f"{100 * result.perplexity_rise:+.2f}{known}%"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def prompt_points(made: PromptEvaluation) -> list[Point]:
    """A labelled point for each candidate."""
    return [
        Point(f"{r.name}  {r.perplexity:.2f}", r.operations_left, r.perplexity, group=r.name)
        for r in made.results[1:]
    ]


def write_prompt_plot(
    path: Path, made: PromptEvaluation, points: Iterable[Point], *, title: str
) -> None:
    """Write the plot of perplexity over the operations left; raises `ReportError`."""
    picture = quality_plot(
        points,
        base_size=made.results[0].operations_left,
        base_perplexity=made.results[0].perplexity,
        title=title,
        size_label=f"share of the layers' operations on a prompt of {made.prompt:,} tokens",
        file_format=plot_format(path),
    )
    write_atomically(path, picture)
