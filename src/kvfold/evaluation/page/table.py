"""A run on the terminal: every figure with its interval and what its difference amounts to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvfold.evaluation.gate import Check
from kvfold.evaluation.page.runs import Run
from kvfold.evaluation.page.words import (
    bytes_text,
    change_text,
    interval_text,
    seconds_text,
    value_text,
    verdict_text,
)
from kvfold.evaluation.report import bare_table
from kvfold.evaluation.tasks.registry import shown_name

COLOURS = {"better": "green", "worse": "red"}
AS_FAR_AS_TOLD = {
    "same": "no item differs",
    "within noise": "the difference is within noise",
    "too few items": "too few items to tell a difference",
}
"""What is said of a rule that was not kept, by the verdict of its difference."""


def figures_table(run: Run) -> Table:
    """A section for each metric of each task; parts such as `accuracy/depth 0.5` are left out."""
    table = bare_table(
        caption="95% intervals; differences are from the plain model on the same items; parts of "
        "figures (by layer, length or depth) are in metrics.json and in the report"
    )
    table.add_column("", overflow="fold", min_width=24, max_width=44)
    for heading in ("value", "interval", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    metrics = ((t, m) for t in run.metrics["tasks"] for m in run.metric_names(t) if "/" not in m)
    for task, metric in metrics:
        found = run.figures(task, metric)
        table.add_row(escape(f"{shown_name(task)}.{metric}"), style="bold")
        for index, (name, figure) in enumerate(found.items()):
            verdict = verdict_text(figure)
            table.add_row(
                f"  {escape(name)}",
                value_text(figure),
                interval_text(figure),
                "" if verdict == "same" else change_text(figure),
                f"[{COLOURS[verdict]}]{verdict}[/]" if verdict in COLOURS else verdict,
                end_section=index == len(found) - 1,
            )
    return table


def cost_tables(run: Run) -> list[Table]:
    """Bytes of every subject at each length; and times after each prompt, if any were measured."""
    subjects = run.cost.get("subjects", {})
    sizes = bare_table(caption="bytes of one row in bfloat16; add-on: its weights")
    times = bare_table(
        caption=f"{run.timed}, measured in turns; first token: from an empty cache on; peak: "
        "memory above the model's own"
    )
    for table, headings in (
        (sizes, ("tokens", "stored", "smaller", "in memory", "smaller", "add-on")),
        (times, ("prompt", "prefill", "first token", "decode tok/s", "peak")),
    ):
        table.add_column("", overflow="fold", min_width=14, max_width=30)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
    for name, subject in subjects.items():
        _section(sizes, name, [_bytes_cells(e, subject) for e in subject["memory"]])
        _section(times, name, [_speed_cells(speed) for speed in subject["speed"]])
    return [table for table in (sizes, times) if table.row_count]


def _section(table: Table, name: str, rows: Sequence[Sequence[str]]) -> None:
    for index, row in enumerate(rows):
        shown = escape(name) if index == 0 else ""
        table.add_row(shown, *row, end_section=index == len(rows) - 1)


def _bytes_cells(memory: Mapping[str, Any], subject: Mapping[str, Any]) -> list[str]:
    return [
        f"{memory['tokens']:,}",
        bytes_text(memory["stored_bytes"]),
        f"{memory['times_smaller']:.2f}x",
        bytes_text(memory["resident_bytes"]),
        f"{memory['resident_times_smaller']:.2f}x",
        bytes_text(subject["addon_bytes"]),
    ]


def _speed_cells(speed: Mapping[str, Any]) -> list[str]:
    return [
        f"{speed['history']:,}",
        seconds_text(speed["prefill_seconds"]),
        seconds_text(speed["first_token_seconds"]),
        f"{speed['decode_tokens_per_second']:.1f}",
        bytes_text(speed["peak_bytes"]),
    ]


def failures_table(checks: Sequence[Check]) -> Table:
    """The rules that were not kept."""
    table = bare_table(
        caption="max_drop, max_rise: from the plain model, in points of an accuracy (0.02 is two "
        "points), else as a fraction of its figure"
    )
    for heading in ("rule not kept", "subject"):
        table.add_column(heading, overflow="fold")
    for heading in ("allowed", "measured"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for check in checks:
        if not check.passed:
            table.add_row(
                escape(f"{check.rule.metric} {check.rule.bound}"),
                escape(check.subject),
                f"{check.rule.limit:.4g}",
                f"{check.measured:.4g}",
                AS_FAR_AS_TOLD.get(check.verdict or "", ""),
            )
    return table
