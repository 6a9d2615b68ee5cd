"""A published table's rows are kept, in order, and never mixed with those of other settings."""

from __future__ import annotations

import json

import pytest

from kvfold.errors import ReportError
from kvfold.evaluation.rows import Rows


def test_rows_that_are_measured_already_are_kept_and_others_put_in_order(tmp_path):
    path, settings = tmp_path / "made.json", {"model": "m", "windows": 8}
    table = Rows(path, settings)
    table.shared["base"] = {"perplexity": 27.6}
    table.add({"name": "b"}, ["a", "b"])
    table.add({"name": "a"}, ["a", "b"])
    again = Rows(path, settings)
    assert list(again.rows) == ["a", "b"]
    assert "a" in again
    assert "c" not in again
    assert again.shared == {"base": {"perplexity": 27.6}}
    assert json.loads(path.read_text())["settings"] == settings


def test_rows_of_another_measurement_are_not_mixed_in(tmp_path):
    Rows(tmp_path / "made.json", {"windows": 8}).save()
    with pytest.raises(ReportError, match="name another --out"):
        Rows(tmp_path / "made.json", {"windows": 2})
