"""`kvfold demo`, on a tiny model."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def demo(kvfold, tiny_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("demo") / "out"
    done = kvfold(
        "demo", "--model", tiny_folder, "-o", output, "--tokens", 2048, "--windows", 2,
        "--window", 256,
    )  # fmt: skip
    return done, output


def test_the_demo_goes_through_and_says_what_to_do_next(demo):
    done, _ = demo
    assert done.exit_code == 0, done.output
    for words in ("no compression", "kvfold fit MODEL", "kvfold.attach", "balanced, shared"):
        assert words in done.output


def test_every_line_fits_a_hundred_columns(demo):
    assert max(len(line) for line in demo[0].stdout.splitlines()) <= 100


def test_figures_plot_and_addons_are_left_in_the_folder(demo):
    _, output = demo
    assert sorted(path.name for path in output.iterdir()) == [
        "8x",
        "balanced",
        "ced",
        "csa2",
        "evaluation.json",
        "k8v4",
        "quality-against-bytes.png",
    ]
    data = json.loads((output / "evaluation.json").read_text())
    assert data["results"][0]["name"] == "no compression"
    assert len(data["results"]) == 6


def test_a_file_in_the_way_is_refused(kvfold, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # so that no line ends within what is looked for
    (tmp_path / "out").write_text("")
    done = kvfold("demo", "--model", tiny_folder, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "is a file" in done.output
