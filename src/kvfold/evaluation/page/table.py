"""A run on the terminal: every figure with its interval and what its difference amounts to."""

from __future__ import annotations

from collections.abc import Sequence

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

COLOURS = {"better": "green", "worse": "red"}


def figures_table(run: Run) -> Table:
    """A section for each metric of each task; parts such as `accuracy/depth 0.5` are left out."""
    table = bare_table(
        caption="95% intervals; differences are from the plain model on the same items; parts of "
        "figures (by layer, length or depth) are in metrics.json and in the report"
    )
    table.add_column("", overflow="fold", min_width=16, max_width=30)
    table.add_column("", overflow="fold", min_width=14, max_width=24)
    for heading in ("value", "interval", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for task in run.metrics["tasks"]:
        for metric in run.metric_names(task):
            if "/" in metric:
                continue
            found = run.figures(task, metric)
            for index, (name, figure) in enumerate(found.items()):
                verdict = verdict_text(figure)
                table.add_row(
                    escape(f"{task}.{metric}") if index == 0 else "",
                    escape(name),
                    value_text(figure),
                    interval_text(figure),
                    "" if verdict == "same" else change_text(figure),
                    f"[{COLOURS[verdict]}]{verdict}[/]" if verdict in COLOURS else verdict,
                    end_section=index == len(found) - 1,
                )
    return table


def cost_table(run: Run) -> Table:
    """Bytes at each length, and times after each prompt, of every subject."""
    table = bare_table(
        caption="stored, in memory: bytes of one row in bfloat16; first token: from an empty cache "
        "on; peak: above the model's own memory"
    )
    table.add_column("", overflow="fold", min_width=14, max_width=22)
    for heading in ("tokens", "stored", "smaller", "in memory", "add-on"):
        table.add_column(heading, justify="right")
    timed = any(subject["speed"] for subject in run.cost["subjects"].values())
    if timed:
        for heading in ("prompt", "prefill", "first\ntoken", "decode\ntok/s", "peak"):
            table.add_column(heading, justify="right")
    for name, subject in run.cost["subjects"].items():
        count = max(len(subject["memory"]), len(subject["speed"]))
        for index in range(count):
            row = [escape(name) if index == 0 else ""]
            memory = subject["memory"][index] if index < len(subject["memory"]) else None
            row += (
                [""] * 4
                if memory is None
                else [
                    f"{memory['tokens']:,}",
                    bytes_text(memory["stored_bytes"]),
                    f"{memory['times_smaller']:.2f}x",
                    bytes_text(memory["resident_bytes"]),
                ]
            )
            row.append(bytes_text(subject["addon_bytes"]) if index == 0 else "")
            if timed:
                row += _speed_cells(subject["speed"], index)
            table.add_row(*row, end_section=index == count - 1)
    return table


def _speed_cells(speeds: Sequence[dict[str, float]], index: int) -> list[str]:
    if index >= len(speeds):
        return [""] * 5
    speed = speeds[index]
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
                "the difference is within noise" if check.within_noise else "",
            )
    return table
