"""Where things stand in the pictures of a page: numbers to coordinates, and the Pareto front.

Pictures are drawn for a width of 380 units, so that their letters can be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.evaluation.page.words import bytes_text, value_text

WIDTH, HEIGHT = 380.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 368.0, 14.0, 226.0
DOT = 15.0
"""How far apart dots stand at least: nearly their width."""

LOGARITHMIC_FROM = 4.0
"""Times that the largest size is the smallest, from which sizes stand on a logarithmic axis."""


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: its coordinate and what stands beside it."""

    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    """One subject on a plot. number: in the legend; low, high: ends of its interval.

    x: of its size; shown_x: beside that, where another dot would cover it.
    """

    number: int
    name: str
    x: float
    shown_x: float
    y: float
    low: float
    high: float
    on_front: bool
    text: str


@dataclass(frozen=True)
class Plot:
    """Quality against bytes for one metric. front: points of the Pareto front's line."""

    title: str
    note: str
    dots: tuple[Dot, ...]
    front: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_label: str


@dataclass(frozen=True)
class Line:
    """One subject's values by layer."""

    number: int
    name: str
    points: str
    text: str


@dataclass(frozen=True)
class LayerPlot:
    """A measure by layer, a line for each subject."""

    title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def quality_plot(
    title: str,
    figures: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, float],
    tokens: int,
    numbers: Mapping[str, int],
) -> Plot | None:
    """Quality over stored bytes; None where it isn't known which way is better.

    figures, sizes: by subject. tokens: that sizes are of. numbers: of subjects in the legend.
    """
    better = {figure["better"] for figure in figures.values()}
    if better not in ({"higher"}, {"lower"}):
        return None
    up = better == {"higher"}
    ends = {name: figure["interval"] or [figure["value"]] * 2 for name, figure in figures.items()}
    x_of, x_ticks = _sizes_axis([sizes[name] for name in figures])
    y_of, y_ticks = _values_axis(
        [end for pair in ends.values() for end in pair],
        percent=all(figure["kind"] == "accuracy" for figure in figures.values()),
    )
    front = pareto_front(
        {name: (sizes[name], figure["value"]) for name, figure in figures.items()}, up=up
    )
    shown = apart({name: (x_of(sizes[name]), y_of(f["value"])) for name, f in figures.items()})
    dots = tuple(
        Dot(
            numbers[name],
            name,
            x_of(sizes[name]),
            shown[name],
            y_of(figure["value"]),
            y_of(ends[name][0]),
            y_of(ends[name][1]),
            name in front,
            f"{name}: {value_text(figure)} at {bytes_text(sizes[name])}",
        )
        for name, figure in figures.items()
    )
    by_name = {dot.name: dot for dot in dots}
    return Plot(
        title=title,
        note=f"{'higher' if up else 'lower'} is better",
        dots=dots,
        front=_step([by_name[name] for name in front]),
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        x_label=f"bytes stored at {tokens:,} tokens",
    )


def pareto_front(points: Mapping[str, tuple[float, float]], *, up: bool) -> list[str]:
    """Names that no other beats in size and quality at once, smallest first.

    points: size and quality by name. up: whether more quality is better.
    """
    sign = -1 if up else 1
    found: list[str] = []
    best = math.inf
    for name in sorted(points, key=lambda n: (points[n][0], sign * points[n][1])):
        if sign * points[name][1] < best:
            best = sign * points[name][1]
            found.append(name)
    return found


def apart(places: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Where each dot stands across, so that none covers another: at its place or beside it.

    places: across and down, by name; the first have the first choice.
    """
    found: dict[str, float] = {}
    for name, (x, y) in places.items():
        steps = (side * step * DOT for step in range(len(places)) for side in (1, -1))
        tries = [x + step for step in steps if LEFT + DOT / 2 <= x + step <= RIGHT - DOT / 2]
        free = (
            at
            for at in tries
            if all(math.hypot(at - found[o], y - places[o][1]) >= DOT for o in found)
        )
        found[name] = round(next(free, x), 1)
    return found


def layer_plot(
    title: str, values: Mapping[str, Mapping[int, float]], numbers: Mapping[str, int]
) -> LayerPlot:
    """Lines of values by layer. values: by subject, then by layer."""
    layers = sorted({layer for by_layer in values.values() for layer in by_layer})
    span = max(1, layers[-1] - layers[0])
    y_of, y_ticks = _values_axis([v for by_layer in values.values() for v in by_layer.values()])

    def x_of(layer: int) -> float:
        return round(LEFT + (RIGHT - LEFT - 12) * (layer - layers[0]) / span + 6, 1)

    step = max(1, math.ceil(len(layers) / 8))
    lines = tuple(
        Line(
            numbers[name],
            name,
            " ".join(f"{x_of(layer)},{y_of(by_layer[layer])}" for layer in sorted(by_layer)),
            f"{name}: lowest {min(by_layer.values()):.4g}",
        )
        for name, by_layer in values.items()
    )
    x_ticks = tuple(Tick(x_of(layer), str(layer)) for layer in layers[::step])
    return LayerPlot(title, lines, x_ticks, y_ticks)


def _step(dots: Sequence[Dot]) -> str:
    """The front as a staircase: a size allows the quality of the largest one below it."""
    points: list[str] = []
    for before, dot in zip([None, *dots], dots, strict=False):
        if before is not None:
            points.append(f"{dot.x},{before.y}")
        points.append(f"{dot.x},{dot.y}")
    return " ".join(points)


def _sizes_axis(sizes: Sequence[float]) -> tuple[Any, tuple[Tick, ...]]:
    low, high = max(1.0, min(sizes)), max(1.0, *sizes)
    room = RIGHT - LEFT - 32
    if high / low > LOGARITHMIC_FROM:
        span = math.log(high / low)
        marks = [
            mark * 10**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for mark in (1, 2, 5)
        ]

        def x_of(size: float) -> float:
            return round(LEFT + 16 + room * math.log(max(1.0, size) / low) / span, 1)
    else:
        low, high = low - (high - low or low) * 0.05, high + (high - low or high) * 0.05
        marks = nice_steps(low, high)

        def x_of(size: float) -> float:
            return round(LEFT + 16 + room * (max(1.0, size) - low) / (high - low), 1)

    shown = [mark for mark in marks if low <= mark <= high]
    every = max(1, math.ceil(len(shown) / 5))
    return x_of, tuple(Tick(x_of(mark), bytes_text(mark)) for mark in shown[::every])


def _values_axis(values: Sequence[float], *, percent: bool = False) -> tuple[Any, tuple[Tick, ...]]:
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.02 * abs(high) or 0.5
    low, high = low - margin, high + margin

    def y_of(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    marks = nice_steps(low, high)
    texts = [f"{100 * mark:.4g}%" if percent else f"{mark:.4g}" for mark in marks]
    return y_of, tuple(Tick(y_of(mark), text) for mark, text in zip(marks, texts, strict=True))


def nice_steps(low: float, high: float, count: int = 5) -> list[float]:
    """At most about `count` round numbers between two others."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(mark * power for mark in (1, 2, 5, 10) if mark * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]
