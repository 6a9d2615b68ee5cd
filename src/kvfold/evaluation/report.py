"""What a person and a machine read of an evaluation: tables, JSON and a plot.

Tables fit 100 columns and begin with the plain model. Files appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.table import Table

from kvfold.errors import EvaluationError, ReportError
from kvfold.evaluation.environment import environment
from kvfold.evaluation.memory import Memory
from kvfold.evaluation.plot import Point, quality_plot
from kvfold.evaluation.runner import Evaluation, Result
from kvfold.evaluation.speed import Speed
from kvfold.runtime.ledger import COMPONENTS

PEAK_CAPTION = (
    "; peak: memory above the model's at its highest, cache included, in the timed prefill of {:,} "
    "tokens and the steps after it, in the dtype that it ran in"
)
PLOT_FORMATS = ("png", "svg", "pdf")


class Measured(Protocol):
    """One candidate, as far as tables of bytes show it."""

    @property
    def name(self) -> str:
        """What its rows are called."""

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Its bytes, by length."""

    @property
    def speed(self) -> Speed | None:
        """Its speed, with the peak of its memory, if that was measured."""


class Measurement(Protocol):
    """Whatever was measured of the plain model and then of candidates."""

    @property
    def results(self) -> Sequence[Measured]:
        """The plain model's first."""

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data."""


def readable_bytes(count: float) -> str:
    """Bytes in the largest unit that keeps at least one digit before the point (1 kB = 1,000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def quality_table(evaluation: Evaluation) -> Table:
    """One row a candidate: quality, bytes at the middle length, speed; the plain model first."""
    spot = len(evaluation.results[0].memory) // 2
    timed = evaluation.results[0].speed is not None
    sizes = evaluation.results[0].memory
    at = f"; bytes at {sizes[spot].tokens:,} tokens" if sizes else ""
    table = bare_table(caption=f"history: {evaluation.history}{at}; {evaluation.convention}")
    table.add_column("", overflow="fold", min_width=14, max_width=24)
    for heading in ("PPL", "KL", "top-1", "top-5", "recovery"):
        table.add_column(heading, justify="right")
    if evaluation.results[0].memory:
        table.add_column("stored,\nsmaller", justify="right")
        table.add_column("in memory,\nsmaller", justify="right")
    if timed:
        table.add_column("prefill\ntok/s", justify="right")
        table.add_column("decode\ntok/s", justify="right")
    for result in evaluation.results:
        table.add_row(*_quality_cells(result, spot))
    return table


def _quality_cells(result: Result, spot: int) -> list[str]:
    quality = result.quality
    recovery = "-" if quality.recovery is None else f"{quality.recovery:.3f}"
    cells = [result.name, f"{quality.perplexity:.2f}", f"{quality.kl:.4f}"]
    cells += [f"{100 * quality.top_1_agreement:.1f}%", f"{100 * quality.top_5_agreement:.1f}%"]
    cells.append(recovery)
    if result.memory:
        memory = result.memory[spot]
        cells += [f"{memory.times_smaller:.2f}x", f"{memory.resident_times_smaller:.2f}x"]
    if result.speed is not None:
        cells.append(_rate(result.speed.prefill_tokens_per_second))
        cells.append(_rate(result.speed.decode_tokens_per_second))
    return cells


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 99.95 else f"{tokens_per_second:.1f}"


def memory_table(evaluation: Measurement) -> Table:
    """Bytes stored and in memory for every candidate and length, in bfloat16."""
    timed = evaluation.results[0].speed
    table = bare_table(
        caption="bytes of one row in bfloat16; stored: what has to be kept or written down; in "
        "memory: what is resident while it runs; bits a value: of the attention cache, for each "
        "key or value that the plain cache holds; add-on: its weights, in no other column"
        + (PEAK_CAPTION.format(timed.history) if timed is not None else "")
    )
    table.add_column("", overflow="fold", min_width=14, max_width=22)
    for heading in (
        "tokens",
        "stored",
        "smaller",
        "bits a\nvalue",
        "in memory",
        "smaller",
        "bits a\nvalue",
        "add-on",
        *(("peak",) if timed is not None else ()),
    ):
        table.add_column(heading, justify="right")
    for result in evaluation.results:
        for index, memory in enumerate(result.memory):
            table.add_row(
                result.name if index == 0 else "",
                f"{memory.tokens:,}",
                readable_bytes(memory.stored_bytes),
                f"{memory.times_smaller:.2f}x",
                f"{memory.bits_per_value:.2f}",
                readable_bytes(memory.resident_bytes),
                f"{memory.resident_times_smaller:.2f}x",
                f"{memory.resident_bits_per_value:.2f}",
                readable_bytes(memory.addon_bytes) if index == 0 and memory.addon_bytes else "",
                *_peak_cells(result, shown=index == 0),
                end_section=index == len(result.memory) - 1,
            )
    return table


def _peak_cells(result: Measured, *, shown: bool) -> list[str]:
    if result.speed is None:
        return []
    peak = result.speed.peak_bytes
    return ["-" if peak is None else readable_bytes(peak)] if shown else [""]


def component_table(evaluation: Measurement) -> Table:
    """Stored bytes part by part; parts that no candidate has are left out."""
    table = bare_table(
        caption="stored bytes of one row in bfloat16 (k, M, G: 1,000 each); anchors and window: "
        "exact tokens; slots, scales: folded history; pending: slots of tokens in the window, "
        "tokens of an unfinished group; plain: layers that are not folded; recurrent: states of "
        "linear attention; kept: of the plain cache's bytes",
        padding=0,
    )
    memories = [memory for result in evaluation.results for memory in result.memory]
    parts = [name for name in COMPONENTS if any(m.components.get(name) for m in memories)]
    table.add_column("", overflow="fold", min_width=11, max_width=22)
    headings = ["recur-\nrent" if name == "recurrent" else name for name in parts]
    for heading in ("tokens", *headings, "total", "smaller", "bits a\nvalue", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in evaluation.results:
        for index, memory in enumerate(result.memory):
            table.add_row(
                result.name if index == 0 else "",
                f"{memory.tokens:,}",
                *(_short_bytes(memory.components.get(name, 0)) for name in parts),
                _short_bytes(memory.stored_bytes),
                f"{memory.times_smaller:.2f}x",
                f"{memory.bits_per_value:.2f}",
                f"{100 * memory.kept_fraction:.1f}%",
                end_section=index == len(result.memory) - 1,
            )
    return table


def _short_bytes(count: int) -> str:
    """`readable_bytes` in at most five characters, as `94.4M`; a dash for nothing."""
    return readable_bytes(count).removesuffix("B").replace(" ", "") if count else "-"


def bare_table(caption: str, *, padding: int = 1) -> Table:
    """An empty table in the manner of all others here."""
    return Table(
        box=box.SIMPLE_HEAD,
        padding=(0, padding),
        collapse_padding=True,
        pad_edge=False,
        caption=caption,
        caption_justify="left",
        caption_style="dim",
        header_style="bold",
    )


def report_data(evaluation: Measurement, config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a reader needs to make the figures again; config: what the caller chose."""
    return {**environment(), "config": dict(config), **evaluation.to_dict()}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write data as indented JSON, whole or not at all; raises `ReportError`."""
    text = json.dumps(data, indent=2, allow_nan=False, default=str)
    write_atomically(path, (text + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that `write_json` wrote; raises `EvaluationError` for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EvaluationError(
            f"{path} must be a JSON object in UTF-8; {error}; make it anew, or delete it"
        ) from None
    if not isinstance(data, dict):
        raise EvaluationError(
            f"{path} must be a JSON object; it is a {type(data).__name__}; delete it"
        )
    return data


def write_plot(path: Path, evaluation: Evaluation, *, title: str) -> None:
    """Write the plot of perplexity over stored bytes at the middle length; raises `ReportError`."""
    file_format = plot_format(path)
    plain, *rest = evaluation.results
    if not plain.memory:
        raise ReportError(f"a plot needs at least one length for its bytes; none for {path}")
    spot = len(plain.memory) // 2
    points = [
        Point(
            f"{result.name}  {result.quality.perplexity:.2f}",
            result.memory[spot].stored_bytes / 1e6,
            result.quality.perplexity,
            group=result.name,
        )
        for result in rest
    ]
    picture = quality_plot(
        points,
        base_size=plain.memory[spot].stored_bytes / 1e6,
        base_perplexity=plain.quality.perplexity,
        title=title,
        size_label=f"stored MB of cache at {plain.memory[spot].tokens:,} tokens (bfloat16)",
        file_format=file_format,
    )
    write_atomically(path, picture)


def plot_format(path: Path) -> str:
    """The picture format that a file name asks for; raises `ReportError` for an unknown one."""
    file_format = path.suffix.lower().removeprefix(".")
    if file_format not in PLOT_FORMATS:
        raise ReportError(
            f"a plot's file name must end in .{', .'.join(PLOT_FORMATS)}; got {str(path)!r}"
        )
    return file_format


def place_of(path: Path) -> Path:
    """Where a file that is named so is written: a link is followed, so that it stays a link.

    Raises `ReportError` for what is there and is no regular file: a folder, a pipe or a device,
    which a file would take the place of.
    """
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        regular = True
    except OSError as error:
        raise ReportError(f"can't write {path}: {error.strerror or error}") from error
    if not regular:
        raise ReportError(
            f"can't write {path}: it is there and is no regular file; name a file, new or to be "
            "replaced"
        )
    return Path(os.path.realpath(path))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file through a neighbour that is then renamed, so that it is never half there.

    Raises `ReportError` where that can't be, and as `place_of` does.
    """
    place, temporary = place_of(path), None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(place)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise ReportError(f"can't write {path}: {error.strerror or error}") from error
