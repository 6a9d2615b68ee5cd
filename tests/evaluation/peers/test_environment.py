"""The environment of peers: made where nothing else is, asked what it has, and never guessed."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvfold.errors import PeerError
from kvfold.evaluation.peers import environment
from kvfold.evaluation.peers.environment import PINNED, PeerEnvironment, peer_environment


def test_an_environment_tells_its_versions(here):
    assert here.versions["torch"] == metadata.version("torch")
    assert here.versions["transformers"] == metadata.version("transformers")


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(PeerError, match="a folder of its own"):
        peer_environment(tmp_path, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("place", ["file", "file/within", "locked"])
def test_a_place_where_no_folder_can_be_is_told(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "locked.lock").mkdir()
    with pytest.raises(PeerError, match=r"a folder that can be made and read.*--peers-env"):
        peer_environment(tmp_path / place, lambda _: None)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_python_that_does_not_run_is_named(tmp_path):
    with pytest.raises(PeerError, match="missing-python"):
        PeerEnvironment.of(tmp_path / "missing-python")


def test_the_folder_is_named_by_what_is_in_it():
    name = environment.default_folder().name
    assert all(f"{package}-{version}" in name for package, version in PINNED.items())


@pytest.fixture
def made_by_hand(tmp_path):
    """`made_by_hand(script)`: an environment whose Python is a shell script."""

    def make(script):
        python = tmp_path / "env" / "bin" / "python"
        python.parent.mkdir(parents=True)
        (tmp_path / "env" / "pyvenv.cfg").write_text("")
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return tmp_path / "env"

    return make


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_what_pip_said_last_is_in_the_error(made_by_hand):
    folder = made_by_hand('[ "$2" = "pip" ] && { echo no room left; exit 3; }; echo "{}"')
    told = []
    with pytest.raises(PeerError, match=r"(?s)kvpress==.*status 3.*no room left"):
        peer_environment(folder, told.append)
    assert any("kvpress==" in line for line in told) and "no room left" in told


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_an_environment_that_has_all_is_used_as_it_is(made_by_hand):
    versions = ", ".join(f'"{name}": "{version}"' for name, version in PINNED.items())
    folder = made_by_hand(f"[ \"$2\" = pip ] && exit 9; echo '{{{versions}}}'")
    found = peer_environment(folder, lambda line: pytest.fail(line))
    assert found.versions == dict(PINNED) and found.python == Path(folder, "bin", "python")
