"""Every number of a log's lines reaches a tracker; a tracker that is missing names its extra."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvfold.errors import FitError, MissingExtraError
from kvfold.fitting.trackers import tracking

LINES: list[dict[str, Any]] = [
    {"event": "begin", "recipe": "small", "base": {"kl": 0.0}},
    {"stage": "distil", "number": 2, "step": 1, "loss": 0.5, "kl": 0.25, "rate": 1e-3},
    {"stage": "distil", "number": 2, "step": 2, "loss": 0.25, "kl": 0.125, "rate": 2e-3},
    {"stage": "distil", "number": 2, "step": 2, "held_out_kl": 0.75},
    {"event": "end", "name": "distil", "kl_after": 0.5, "kept": True, "why": None},
    {"event": "end", "name": "gates", "kl_after": 0.375, "kept": True, "why": None},
]
CURVES = {
    "2-distil/loss": [(1, 0.5), (2, 0.25)],
    "2-distil/kl": [(1, 0.25), (2, 0.125)],
    "2-distil/rate": [(1, 1e-3), (2, 2e-3)],
    "2-distil/held_out_kl": [(2, 0.75)],
    "end/kl_after": [(1, 0.5), (2, 0.375)],
}


def test_tensorboard_has_a_curve_of_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'kvfold[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracking("tensorboard", "small", tmp_path / "curves") as track:
        for line in LINES:
            track(line)
    read = EventAccumulator(str(tmp_path / "curves"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(CURVES)
    for name, points in CURVES.items():
        found = [(event.step, event.value) for event in read.Scalars(name)]
        assert found == [(step, pytest.approx(value)) for step, value in points]


def test_trackio_has_a_curve_of_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio", reason="pip install 'kvfold[trackio]'")
    from trackio.sqlite_storage import SQLiteStorage

    with tracking("trackio", "small", tmp_path) as track:
        for line in LINES:
            track(line)
    logged = SQLiteStorage.get_logs("kvfold", "small")
    for name, points in CURVES.items():
        assert [(row["step"], row[name]) for row in logged if name in row] == points


def test_no_tracker_takes_lines_and_does_nothing(tmp_path: Path) -> None:
    with tracking(None, "small", tmp_path / "curves") as track:
        for line in LINES:
            track(line)
    assert not (tmp_path / "curves").exists()


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_missing_tracker_names_its_extra(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with (
        pytest.raises(MissingExtraError, match=rf"kvfold\[{name}\]"),
        tracking(name, "small", tmp_path),
    ):
        pass


def test_another_tracker_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(FitError, match="one of tensorboard, trackio"),
        tracking("pen", "small", tmp_path),  # type: ignore[arg-type]
    ):
        pass
