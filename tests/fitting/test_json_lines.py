"""The log of a training stays JSON, whatever was going on when its process died."""

from __future__ import annotations

import json
import math

from kvfold.fitting.json_lines import JsonLines


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_that_a_kill_tore_is_dropped_when_the_run_goes_on(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"stage": "dist')
    with JsonLines(path, go_on=True) as log:
        log.write({"step": 2})
    assert lines_of(path) == [{"step": 1}, {"step": 2}]


def test_a_whole_log_goes_on_as_it_is_and_a_new_one_begins_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n')
    with JsonLines(path, go_on=True) as log:
        log.write({"step": 2})
    assert lines_of(path) == [{"step": 1}, {"step": 2}]
    with JsonLines(path) as log:
        log.write({"step": 3})
    assert lines_of(path) == [{"step": 3}]


def test_numbers_that_json_has_no_word_for_are_null(tmp_path):
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as log:
        log.write({"kl": math.nan, "looks": [(1, math.inf)], "loss": 0.5})
    assert lines_of(path) == [{"kl": None, "looks": [[1, None]], "loss": 0.5}]
