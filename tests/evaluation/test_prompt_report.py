"""The table and the plot of what follows a prompt."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvfold.errors import ReportError
from kvfold.evaluation.prompt_report import prompt_points, prompt_table, write_prompt_plot
from kvfold.evaluation.prompt_runner import PromptEvaluation, PromptResult
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.speed import Speed

LONG = "a-very-long-candidate-name-" * 3


def evaluation(*, timed=True, error=0.0123, names=("a", LONG)):
    def result(name, plan, rise, left, rate):
        speed = Speed(32_768, rate, 1.0, None) if timed else None
        return PromptResult(name, plan, 3.3, 27.11, (3.3,), (), rise, error, 9, left, speed=speed)

    plain = result(PLAIN, None, 0.0, 1.0, 100.0)
    rest = (result(name, {}, 0.05, 0.5625, 180.0) for name in names)
    return PromptEvaluation((plain, *rest), 8, 32_768, 128, "float32")


def lines_of(table):
    console = Console(width=100, file=io.StringIO())
    console.print(table)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_rows_hold_quality_and_what_the_prompt_cost():
    lines = lines_of(prompt_table(evaluation()))
    assert "no compression 27.11 - 100% 327.7 1.00x" in lines
    assert "a 27.11 +5.13 ± 1.29% 56% 182.0 1.80x" in lines
    assert any("the 128 tokens after a prompt of 32,768, 8 windows" in line for line in lines)
    assert max(map(len, lines)) <= 100
    assert "…" not in "".join(lines)


def test_seconds_and_errors_that_were_not_measured_are_left_out():
    lines = lines_of(prompt_table(evaluation(timed=False, error=None)))
    assert "a 27.11 +5.13% 56%" in lines
    assert not any("seconds" in line for line in lines)


def test_the_marked_row_has_a_star():
    lines = lines_of(prompt_table(evaluation(), marked="a"))
    assert [line[:4] for line in lines if line.startswith("*")] == ["* a "]
    assert not any("*" in line for line in lines_of(prompt_table(evaluation())))


def test_the_plot_has_a_point_for_each_candidate(tmp_path):
    made = evaluation(names=("a", "b"))
    points = prompt_points(made)
    assert [(point.group, point.size) for point in points] == [("a", 0.5625), ("b", 0.5625)]
    write_prompt_plot(tmp_path / "p.png", made, points, title="t")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ReportError, match="png"):
        write_prompt_plot(tmp_path / "p.bmp", made, points, title="t")
