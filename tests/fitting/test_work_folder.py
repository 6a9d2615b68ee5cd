"""A run's work folder is its own: no second run comes in, and nobody else's files are deleted."""

from __future__ import annotations

import pytest

from kvfold.errors import FitError
from kvfold.fitting.work_folder import check_free, delete, held, is_of_a_run


def test_a_second_run_is_refused_while_the_first_is_at_work(tmp_path):
    work = tmp_path / "out.work"
    with held(work, first=True):
        with pytest.raises(FitError, match="in use by another run"), held(work, first=True):
            pass
        with pytest.raises(FitError, match="in use by another run"):
            delete(work)
        with held(work, first=False):
            pass
    with held(work, first=True):
        assert is_of_a_run(work)


def test_a_run_that_stopped_before_it_did_anything_leaves_nothing_in_the_way(tmp_path):
    work = tmp_path / "out.work"
    with pytest.raises(ValueError, match="no text"), held(work, first=True):
        raise ValueError("no text")
    assert not work.exists()
    check_free(work)


def test_what_a_run_left_is_deleted_and_told_of(tmp_path):
    work = tmp_path / "out.work"
    check_free(work)
    with held(work, first=True):
        (work / "1-distil.checkpoint").write_text("half way")
    with pytest.raises(FitError, match="--resume"):
        check_free(work)
    delete(work)
    assert not work.exists()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_somebody_else_made_is_neither_used_nor_deleted(tmp_path, kind):
    work = tmp_path / "out.work"
    own = work if kind == "file" else work / "thesis.txt"
    own.parent.mkdir(exist_ok=True)
    own.write_text("precious")
    with pytest.raises(FitError, match="holds something else"):
        check_free(work)
    delete(work)
    assert own.read_text() == "precious"


def test_a_file_in_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "work").write_text("")
    with pytest.raises(FitError, match="it is a file"), held(tmp_path / "work", first=True):
        pass
