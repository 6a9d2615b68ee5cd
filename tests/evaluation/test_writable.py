"""A file that can't be written is told before work is done for it."""

from __future__ import annotations

import os

import pytest

from kvfold.errors import ReportError
from kvfold.evaluation.writable import check_writable


def test_a_file_that_can_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "there.json").write_text("kept")
    for name in ("new.json", "there.json", "folder/that/is/new.json"):
        check_writable(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]
    assert (tmp_path / "there.json").read_text() == "kept"


@pytest.mark.parametrize("name", ["folder", "file/all.json"])
def test_a_place_for_no_file_is_refused(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match=f"can't write .*{name}"):
        check_writable(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_a_file_would_take_the_place_of_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ReportError, match="no regular file"):
        check_writable(tmp_path / "pipe")


def test_a_folder_that_takes_no_files_is_refused(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvfold.evaluation.writable.tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(ReportError, match="Permission denied; name another file"):
        check_writable(tmp_path / "all.json")
