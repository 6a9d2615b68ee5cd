"""Folders are replaced whole or not at all."""

from __future__ import annotations

import os

import pytest

from kvfold.errors import AddOnError
from kvfold.store.folder import check_replaceable, previous, replacing

OWN = ("own.json", "own.bin")


def write(target, text):
    with replacing(target, OWN) as made:
        for name in OWN:
            (made / name).write_text(text)


def contents(target):
    return {path.name: path.read_text() for path in target.iterdir()}


@pytest.fixture
def target(tmp_path):
    write(tmp_path / "parent" / "target", "old")
    return tmp_path / "parent" / "target"


def test_a_new_folder_has_the_files_and_nothing_lies_beside_it(target):
    assert contents(target) == dict.fromkeys(OWN, "old")
    assert list(target.parent.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_replacement_keeps_the_files_of_others(target):
    (target / "mine.txt").write_text("mine")
    (target / "deep").mkdir()
    write(target, "new")
    assert (target / "deep").is_dir()
    (target / "deep").rmdir()
    assert contents(target) == {**dict.fromkeys(OWN, "new"), "mine.txt": "mine"}
    assert list(target.parent.iterdir()) == [target]


def test_an_own_file_that_is_not_written_again_is_an_error_and_nothing_changes(target):
    with pytest.raises(FileNotFoundError), replacing(target, OWN):
        pass
    assert contents(target) == dict.fromkeys(OWN, "old")
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("step", ["block", "fsync", "rename", "second rename"])
def test_an_interruption_leaves_the_old_one(target, monkeypatch, step):
    rename, calls = os.rename, []

    def interrupted(*args):
        raise KeyboardInterrupt

    def second_interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(*args)

    def write_or_stop():
        with replacing(target, OWN) as made:
            for name in OWN:
                (made / name).write_text("new")
            if step == "block":
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if step == "second rename":
            patched.setattr(os, "rename", second_interrupted)
        elif step != "block":
            patched.setattr(os, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_or_stop()
    assert contents(target) == dict.fromkeys(OWN, "old")
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_left_over_between_two_renames_goes_with_the_next_replacement(target):
    os.rename(target, previous(target))
    write(target, "new")
    write(target, "newer")
    assert contents(target) == dict.fromkeys(OWN, "newer")
    assert list(target.parent.iterdir()) == [target]


def test_only_a_free_or_empty_folder_or_one_of_the_same_may_be_replaced(target, tmp_path):
    check_replaceable(target, "own.json", "a thing")
    check_replaceable(tmp_path / "free", "own.json", "a thing")
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty", "own.json", "a thing")
    with pytest.raises(AddOnError, match=r"a thing may replace only another one.* no other\.json"):
        check_replaceable(target, "other.json", "a thing")
    with pytest.raises(AddOnError, match=r"a thing is saved as a folder; .* is a file"):
        check_replaceable(target / "own.json", "own.json", "a thing")
