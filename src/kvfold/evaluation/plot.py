"""The plot of quality against bytes, with no compression as its reference line.

Matplotlib is only used through its file-writing backend, so nothing needs a display.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

INK, QUIET, ACCENT = "#1f2430", "#7a8190", "#2563a8"
PALETTE = ("#2563a8", "#c2571a", "#3f8f4f", "#8a4fa3", "#b8890b", "#4a7f8c", "#a83a4b")
MARKERS = "osD^vph"
MARKER_PIXELS = ((0, 0), (-8, 0), (8, 0), (0, -8), (0, 8))
OFFSETS = (
    (8, 0),
    (6, 6),
    (6, -6),
    (6, 12),
    (6, -12),
    (-8, 8),
    (-8, -8),
    (0, 10),
    (0, -11),
    (-8, 0),
    (14, 14),
)


@dataclass(frozen=True)
class Point:
    """One labelled measurement. group: points of a group share a colour and, if more than one
    of them is given, a line."""

    label: str
    size: float
    perplexity: float
    group: str = ""


def quality_plot(
    points: Iterable[Point],
    *,
    base_size: float,
    base_perplexity: float,
    title: str,
    size_label: str,
    file_format: str = "png",
) -> bytes:
    """The picture as bytes of a PNG, SVG or PDF file: perplexity (lower is better) over size.

    base_size and base_perplexity place the plain model, whose perplexity is the dashed line.
    Equal figures give equal files.
    """
    from matplotlib import rc_context

    base = Point(f"no compression  {base_perplexity:.2f}", base_size, base_perplexity)
    written = io.BytesIO()
    with rc_context({"svg.hashsalt": "kvfold"}):
        figure = quality_figure(points, base, title=title, size_label=size_label)
        figure.savefig(written, format=file_format, metadata=_no_date(file_format))
    return written.getvalue()


def quality_figure(points: Iterable[Point], base: Point, *, title: str, size_label: str) -> Any:
    """The matplotlib figure of `quality_plot`; base: the plain model's point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.0), dpi=160, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = sorted(points, key=lambda point: (point.group, point.size))
    _draw_points(axes, shown)
    axes.axhline(base.perplexity, color=INK, linewidth=1, linestyle=(0, (5, 4)), zorder=1)
    axes.plot([base.size], [base.perplexity], marker="*", color=INK, markersize=12, zorder=4)
    _dress(axes, title, size_label, [*(p.size for p in shown), base.size])
    if max(p.perplexity for p in [base, *shown]) > 2.5 * base.perplexity:
        _logarithmic(axes.yaxis, axes.set_yscale)
    axes.margins(x=0.16, y=0.12)
    figure.draw_without_rendering()
    _place_labels(axes, [base, *shown], canvas.get_renderer())
    return figure


def _draw_points(axes: Any, shown: list[Point]) -> None:
    groups = sorted({point.group for point in shown})
    for index, group in enumerate(groups):
        members = [point for point in shown if point.group == group]
        style = {
            "color": PALETTE[index % len(PALETTE)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": "-" if group and len(members) > 1 else "none",
        }
        axes.plot(
            [point.size for point in members],
            [point.perplexity for point in members],
            linewidth=1.2,
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.8,
            zorder=3,
            **style,
        )


def _dress(axes: Any, title: str, size_label: str, sizes: list[float]) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=12)
    axes.set_xlabel(size_label, color=QUIET)
    axes.set_ylabel("perplexity (lower is better)", color=QUIET)
    if max(sizes) > 3 * min(sizes):
        _logarithmic(axes.xaxis, axes.set_xscale)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c9ced8")
    axes.tick_params(colors=QUIET, which="both", labelsize=9)
    axes.grid(axis="y", color="#eceef2", linewidth=0.8)
    axes.set_axisbelow(True)


def _logarithmic(axis: Any, set_scale: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    low, high = axis.get_data_interval()
    subs = (1.0, 2.0, 5.0) if high > 12 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def _place_labels(axes: Any, points: list[Point], renderer: Any) -> None:
    """Write each label beside its point, where it covers the fewest points and labels."""
    from matplotlib.patheffects import withStroke

    groups = sorted({point.group for point in points[1:]})
    spots = _obstacles(axes, points)
    halo = [withStroke(linewidth=2.5, foreground="white")]
    taken: list[Any] = []
    frame = axes.get_window_extent(renderer)
    for point in points:
        is_base = point is points[0]
        color = INK if is_base else PALETTE[groups.index(point.group) % len(PALETTE)]
        best: tuple[float, Any, Any] | None = None
        for order, (dx, dy) in enumerate(OFFSETS):
            text = axes.annotate(
                point.label,
                (point.size, point.perplexity),
                xytext=(dx, dy),
                textcoords="offset points",
                ha="left" if dx > 0 else "right" if dx < 0 else "center",
                va="center" if dy == 0 else "bottom" if dy > 0 else "top",
                fontsize=8.5,
                color=color,
                path_effects=halo,
                zorder=5,
            )
            box = text.get_window_extent(renderer)
            cost = 0.01 * order + 10 * (not (frame.x0 <= box.x0 and box.x1 <= frame.x1 + 40))
            cost += 4 * sum(box.overlaps(other) for other in taken)
            cost += sum(weight * box.contains(x, y) for x, y, weight in spots)
            text.remove()
            if best is None or cost < best[0]:
                best = (cost, box, text)
        assert best is not None
        axes.add_artist(best[2])
        taken.append(best[1])


def _obstacles(axes: Any, points: list[Point]) -> list[tuple[float, float, float]]:
    """Where labels should not be, in pixels, with how much it matters: points and lines."""
    made = []
    for index, point in enumerate(points):
        here = axes.transData.transform((point.size, point.perplexity))
        made += [(here[0] + dx, here[1] + dy, 0.3) for dx, dy in MARKER_PIXELS]
        following = points[index + 1] if index + 1 < len(points) else None
        if index and point.group and following is not None and following.group == point.group:
            there = axes.transData.transform((following.size, following.perplexity))
            steps = [step / 24 for step in range(1, 24)]
            made += [(*(here + part * (there - here)), 0.15) for part in steps]
    left, right = axes.get_xlim()
    base = axes.transData.transform((points[0].size, points[0].perplexity))[1]
    start, end = (axes.transData.transform((x, 1.0))[0] for x in (left, right))
    made += [(start + part / 100 * (end - start), base, 0.1) for part in range(101)]
    return made


def _no_date(file_format: str) -> dict[str, None]:
    """Leave the date out where a format would write it, so equal figures are equal files."""
    return {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file_format, {})
