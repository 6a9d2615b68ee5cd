"""Tables, JSON and plots of an evaluation."""

from __future__ import annotations

import io
import json
import os

import pytest
from rich.console import Console

from kvfold.errors import ReportError
from kvfold.evaluation import report
from kvfold.evaluation.memory import Memory
from kvfold.evaluation.plot import Point, quality_figure, quality_plot
from kvfold.evaluation.report import (
    component_table,
    memory_table,
    quality_table,
    readable_bytes,
    report_data,
    write_atomically,
    write_json,
    write_plot,
)
from kvfold.evaluation.runner import PLAIN, Evaluation, Quality, Result
from kvfold.evaluation.speed import Speed
from kvfold.runtime.ledger import COMPONENTS as PARTS

COMPONENTS = {"anchors": 1_000, "window": 600_000, "slots": 23_000_000, "plain": 47_200_000}
MEMORY = Memory(4096, COMPONENTS, 70_801_000, 95_000_000, 188_700_000)
WEIGHTY = Memory(4096, COMPONENTS, 70_801_000, 95_000_000, 188_700_000, addon_bytes=13_270_000)
WIDEST = Memory(
    131_072, dict.fromkeys(set(PARTS) - {"unused"}, 99_949_999), *[999_499_999] * 3, 999_499_999
)
"""The widest figures of every column but the name's."""


def result(name, *, recovery=0.5, memory=(MEMORY,), speed=True):
    quality = Quality(3.3, 27.11, 0.01234, 0.9876, 0.9, 30.0, recovery)
    measured = Speed(1024, 123_456.7, 1_234.5, 9) if speed else None
    return Result(name, None, quality, memory, {}, measured)


def evaluation(*results):
    return Evaluation(results, 8, 512, "folded", "windows of 512 tokens", "float32")


def text_of(table):
    console = Console(width=100, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_no_compression_is_the_first_row():
    made = evaluation(result(PLAIN, recovery=None), result("balanced"))
    for table in (quality_table(made), memory_table(made), component_table(made)):
        lines = [
            line for line in text_of(table).splitlines() if "balanced" in line or PLAIN in line
        ]
        assert PLAIN in lines[0]


def test_tables_fit_a_hundred_columns_whatever_the_figures():
    names = [PLAIN, "a-very-long-candidate-name-" * 3, "x"]
    made = evaluation(*(result(name, memory=(MEMORY, WEIGHTY, WIDEST)) for name in names))
    for table in (quality_table(made), memory_table(made), component_table(made)):
        lines = text_of(table).splitlines()
        assert max(len(line.rstrip()) for line in lines) <= 100
        assert "…" not in "".join(lines)


@pytest.mark.parametrize("name", ["balanced", "a-very-long-candidate-name-" * 3])
def test_no_figure_is_cut_off(name):
    text = text_of(quality_table(evaluation(result(PLAIN), result(name))))
    row = next(line for line in text.splitlines() if name[:8] in line)
    figures = "27.11 0.0123 98.8% 90.0% 0.500 2.67x 1.99x 123,457 1,234"
    assert " ".join(row.split()).endswith(figures)
    assert text.count("tok/s") == 2


def test_the_table_names_the_convention_and_the_history():
    text = text_of(quality_table(evaluation(result(PLAIN))))
    assert "windows of 512 tokens" in text
    assert "history: folded" in text


def test_a_missing_recovery_is_a_dash_and_missing_speed_no_column():
    text = text_of(quality_table(evaluation(result(PLAIN, recovery=None, speed=False))))
    assert "tok/s" not in text
    row = next(line for line in text.splitlines() if PLAIN in line)
    assert " - " in row


def test_the_memory_table_shows_bits_and_the_weights_beside():
    text = text_of(memory_table(evaluation(result(PLAIN), result("balanced", memory=(WEIGHTY,)))))
    plain, folded = (" ".join(line.split()) for line in text.splitlines() if "4,096" in line)
    assert plain.endswith("4,096 70.8 MB 2.67x 6.00 95.0 MB 1.99x 8.06 -")
    assert folded.endswith("95.0 MB 1.99x 8.06 13.3 MB -")


def test_every_part_has_its_column_and_missing_parts_have_none():
    text = text_of(component_table(evaluation(result(PLAIN), result("balanced"))))
    heading = " ".join(text.splitlines()[2].split())
    assert heading == "tokens anchors window slots plain total smaller value kept"
    row = next(line for line in text.splitlines() if line.strip().startswith("balanced"))
    figures = "4,096 1.0k 600k 23.0M 47.2M 70.8M 2.67x 6.00 37.5%"
    assert " ".join(row.split()) == f"balanced {figures}"


def test_a_part_of_some_candidates_is_a_dash_for_the_others():
    other = Memory(4096, {"plain": 5_000, "recurrent": 99_900_000}, 99_905_000, 1, 188_700_000)
    text = text_of(component_table(evaluation(result(PLAIN), result("x", memory=(other,)))))
    row = next(line for line in text.splitlines() if line.strip().startswith("x"))
    assert " ".join(row.split()).startswith("x 4,096 - - - 5.0k 99.9M 99.9M 1.89x")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (99_940, "99.9 kB"),
        (99_960, "100 kB"),
        (999_600, "1.0 MB"),
        (94_371_840, "94.4 MB"),
        (3.2e9, "3.2 GB"),
        (5e12, "5.0 TB"),
    ],
)
def test_bytes_are_readable(count, text):
    assert readable_bytes(count) == text


def test_the_report_says_where_its_figures_come_from(tmp_path):
    path = tmp_path / "deep" / "report.json"
    write_json(path, report_data(evaluation(result(PLAIN)), {"model": "tiny", "seed": 0}))
    data = json.loads(path.read_text())
    assert data["config"] == {"model": "tiny", "seed": 0}
    assert {"command", "commit", "machine", "versions", "convention", "results"} <= set(data)
    assert data["machine"]["torch_threads"] >= 1
    assert data["versions"]["torch"]
    memory = data["results"][0]["memory"][0]
    assert memory["times_smaller"] == pytest.approx(188.7 / 70.801)
    assert memory["resident_times_smaller"] == pytest.approx(188.7 / 95)
    assert memory["kept_fraction"] == pytest.approx(70.801 / 188.7)
    assert memory["bits_per_value"] == pytest.approx(16 * 70.801 / 188.7)
    assert memory["resident_bits_per_value"] == pytest.approx(16 * 95 / 188.7)
    assert memory["addon_bytes"] == 0


def test_figures_that_are_not_numbers_never_reach_a_file(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", fail)
    with pytest.raises(ReportError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_link_stays_a_link_to_the_file_that_is_written(tmp_path):
    target, link = tmp_path / "there" / "table.md", tmp_path / "table.md"
    link.symlink_to(target)
    for content in (b"new", b"newer"):
        write_atomically(link, content)
        assert link.is_symlink() and target.read_bytes() == content
    assert [path.name for path in target.parent.iterdir()] == ["table.md"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "folder", "loop"):
        with pytest.raises(ReportError, match="can't write"):
            write_atomically(tmp_path / name, b"new")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "loop").is_symlink()


def test_a_place_that_can_not_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="can't write"):
        write_json(tmp_path / "file" / "report.json", {})


@pytest.mark.parametrize(
    ("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_plots_are_written_in_the_format_of_their_name(tmp_path, suffix, magic):
    path = tmp_path / f"plot.{suffix}"
    write_plot(path, evaluation(result(PLAIN), result("a"), result("b")), title="T")
    assert path.read_bytes().startswith(magic)


def test_an_unknown_plot_format_is_refused_by_name():
    with pytest.raises(ReportError, match=r"\.png, \.svg, \.pdf; got 'x\.bmp'"):
        report.plot_format(report.Path("x.bmp"))


def figure_of(points, base=90.0):
    plain = Point("no compression", base, 27.0)
    return quality_figure(points, plain, title="Quality", size_label="MB")


def test_every_point_is_labelled_and_the_plain_model_is_the_reference_line():
    figure = figure_of([Point(f"p{i}", 10.0 + i, 28.0 + i, f"g{i % 2}") for i in range(4)])
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.texts} == {"no compression", "p0", "p1", "p2", "p3"}
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [set(line.get_ydata()) for line in dashed] == [{27.0}]


def test_labels_of_points_that_are_close_do_not_cover_each_other():
    figure = figure_of([Point(f"label {i}", 20.0, 28.0 + i / 50, f"g{i}") for i in range(4)])
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i]]
    assert not any(a.overlaps(b) for a, b in pairs)


def test_equal_figures_are_equal_files():
    points = [Point("a", 10.0, 28.0, "g")]
    make = {"base_size": 90.0, "base_perplexity": 27.0, "title": "T", "size_label": "MB"}
    for file_format in ("png", "svg", "pdf"):
        first = quality_plot(points, **make, file_format=file_format)
        assert first == quality_plot(points, **make, file_format=file_format)


def test_a_plot_without_candidates_shows_the_plain_model(tmp_path):
    write_plot(tmp_path / "p.png", evaluation(result(PLAIN)), title="T")
    assert (tmp_path / "p.png").stat().st_size > 1000
