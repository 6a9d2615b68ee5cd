"""Figures in words, the same on the page, in Markdown and on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvfold.evaluation.report import readable_bytes

Entry = Mapping[str, Any]
"""A figure of `metrics.json`."""


def value_text(figure: Entry) -> str:
    """`61.3%` for an accuracy, four digits for anything else."""
    return _number(figure["value"], share=figure["kind"] == "accuracy")


def interval_text(figure: Entry) -> str:
    """`58.2–64.1%`, the 95% interval; nothing where there is none."""
    if figure["interval"] is None:
        return ""
    share = figure["kind"] == "accuracy"
    low, high = (_number(end, share=share) for end in figure["interval"])
    between = " to " if low.startswith("-") else "–"
    return f"{low.removesuffix('%')}{between}{high}"


def change_text(figure: Entry) -> str:
    """`-2.1 points` or `+3.4%`, from the plain model; nothing for the plain model itself."""
    difference = figure["difference"]
    if difference is None:
        return ""
    if figure["kind"] == "accuracy":
        return f"{100 * difference['value']:+.1f} points"
    if difference["relative"] is not None:
        return f"{100 * difference['relative']:+.2f}%"
    return f"{difference['value']:+.4g}"


def verdict_text(figure: Entry) -> str:
    """What the difference amounts to: `same`, `too few items`, `within noise`, `better`, `worse`
    or its side."""
    difference = figure["difference"]
    if difference is None:
        return ""
    verdict = str(difference["verdict"])
    if verdict not in ("higher", "lower") or figure["better"] is None:
        return verdict
    return "better" if verdict == figure["better"] else "worse"


def difference_text(figure: Entry) -> str:
    """Change and verdict, as `-2.1 points, worse`."""
    verdict = verdict_text(figure)
    return verdict if verdict in ("", "same") else f"{change_text(figure)}, {verdict}"


def seconds_text(seconds: float | None) -> str:
    """`340 ms` or `12.3 s`."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def bytes_text(count: float | None) -> str:
    """`9.4 MB`, or a dash for what isn't known."""
    return "-" if count is None else readable_bytes(count)


def _number(value: float, *, share: bool) -> str:
    return f"{100 * value:.1f}%" if share else f"{value:.4g}"
