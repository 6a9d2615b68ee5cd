"""A folder that can't be held is told, with the lock's name, instead of an error of the system."""

from __future__ import annotations

import errno
import os

import pytest
from filelock import FileLock

from kvfold.errors import FitError, FolderError
from kvfold.folder_lock import alone_in

BUSY = FitError("busy")


def test_a_lock_that_is_a_folder_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with (
        pytest.raises(FolderError, match=r"\.lock can't be written"),
        alone_in(tmp_path, ".lock", BUSY),
    ):
        pass


def test_a_folder_that_can_not_be_written_is_named(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, *more, **named):
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", refuse)  # root may write wherever it likes
    with (
        pytest.raises(FolderError, match="Permission denied; name a folder"),
        alone_in(tmp_path, ".lock", BUSY),
    ):
        pass


def test_a_held_folder_is_refused_and_free_afterwards(tmp_path):
    with (
        FileLock(tmp_path / ".lock", is_singleton=False),
        pytest.raises(FitError, match="busy"),
        alone_in(tmp_path, ".lock", BUSY),
    ):
        pass
    with alone_in(tmp_path, ".lock", BUSY):
        pass
