"""Compiling our own C++ on the user's machine: once, safely, and never at import."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvfold
from kvfold.runtime import native

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small source, with a cache folder of its own."""
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(native.NATIVE_VARIABLE, raising=False)
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


def compiled(source):
    """As a new process would see it."""
    return native.native_library.__wrapped__(source)


def libraries(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.so"))


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_a_source_is_compiled_once_and_loaded_from_then_on(source, tmp_path, capsys):
    assert compiled(source).answer() == 42
    assert "Compiled answer.cpp in" in capsys.readouterr().err
    assert compiled(source).answer() == 42
    assert capsys.readouterr().err == ""
    assert len(libraries(tmp_path)) == 1


@needs_compiler
def test_those_who_want_it_at_once_share_one_compilation(source, tmp_path, capsys):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compiled, [source] * 4))
    assert [library.answer() for library in found] == [42] * 4
    assert capsys.readouterr().err.count("Compiled") == 1
    assert len(libraries(tmp_path)) == 1


@needs_compiler
def test_another_source_or_processor_gets_a_library_of_its_own(source, tmp_path, monkeypatch):
    compiled(source)
    source.write_text('extern "C" int answer() { return 43; }\n')
    assert compiled(source).answer() == 43
    monkeypatch.setattr(native, "_processor", lambda: "another")
    compiled(source)
    assert len(libraries(tmp_path)) == 3


@needs_compiler
def test_a_compiler_without_openmp_makes_a_serial_library(source, tmp_path, monkeypatch, capsys):
    real = native.find_compiler()
    refusing = f'case "$*" in *-fopenmp*) exit 1;; esac; exec {real} "$@"'
    monkeypatch.setenv("CXX", script(tmp_path / "serial", refusing))
    assert compiled(source).answer() == 42
    assert "for one thread" in capsys.readouterr().err


@needs_compiler
def test_a_library_that_does_not_load_is_not_kept(source, tmp_path, monkeypatch, capsys):
    """As where a compiler knows OpenMP but its runtime is missing."""
    real = native.find_compiler()
    unlinked = f'case "$*" in *-fopenmp*) set -- "$@" -DBROKEN;; esac; exec {real} "$@"'
    monkeypatch.setenv("CXX", script(tmp_path / "unlinked", unlinked))
    source.write_text(
        'extern "C" int missing();\nextern "C" int answer() {\n#ifdef BROKEN\n'
        "return missing();\n#else\nreturn 42;\n#endif\n}\n"
    )
    assert compiled(source).answer() == 42
    assert len(libraries(tmp_path)) == 1


def test_a_compiler_that_fails_is_named_and_nothing_is_left(source, tmp_path, monkeypatch, capsys):
    failing = script(tmp_path / "failing", "echo no such machine >&2; exit 3")
    monkeypatch.setenv("CXX", failing)
    assert compiled(source) is None
    said = capsys.readouterr().err
    assert "plain path" in said and failing in said and "no such machine" in said
    assert libraries(tmp_path) == []


def test_without_a_compiler_it_is_said_what_to_install(source, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert compiled(source) is None
    said = capsys.readouterr().err
    assert "no C++ compiler was found" in said and "install g++" in said


@needs_compiler
def test_a_cache_folder_that_cannot_be_written_is_named(source, tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("KVFOLD_CACHE", str(blocked))
    assert compiled(source) is None
    assert str(blocked) in capsys.readouterr().err


def test_it_can_be_switched_off(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(native.NATIVE_VARIABLE, "0")
    assert compiled(source) is None
    assert capsys.readouterr().err == "" and libraries(tmp_path) == []


def test_nothing_is_compiled_at_import(tmp_path):
    environment = {
        **os.environ,
        "KVFOLD_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(kvfold.__file__).parents[1]),
    }
    command = [sys.executable, "-c", "import kvfold.runtime.quantised_reading"]
    subprocess.run(command, check=True, env=environment)
    assert not (tmp_path / "cache").exists()
