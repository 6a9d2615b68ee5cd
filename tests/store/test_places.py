"""Files of a store: whole or not there, within the budget, whoever else writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from kvfold.errors import MissingExtraError, SnapshotError
from kvfold.store.places import Entry, LocalPlace, RemotePlace, doomed, place_at

WRITER = """
import sys, time
from pathlib import Path
from kvfold.store.places import LocalPlace

place, who = LocalPlace(Path(sys.argv[1])), sys.argv[2]
stop = time.monotonic() + float(sys.argv[3])
count = 0
while count < 3 or time.monotonic() < stop:
    name = f"{who}-{count % 7}"
    place.write(name, name.encode() * 20000, 600_000)
    for entry in place.entries():
        content = place.read(entry.name)
        assert content is None or content == entry.name.encode() * 20000, entry.name
    count += 1
print("done", count, flush=True)
"""


def writer(folder, who, seconds):
    environment = {**os.environ, "PYTHONPATH": str(Path(kvfold.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), who, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    if request.param == "local":
        return place_at(tmp_path / "store")
    pytest.importorskip("fsspec")
    made = place_at(f"memory://store-{time.time_ns()}")
    assert isinstance(made, RemotePlace)
    return made


def names(place):
    return sorted(entry.name for entry in place.entries())


def test_files_are_written_read_and_removed(place):
    assert place.entries() == []
    assert place.read("a") is None
    place.write("a", b"12345", 100)
    place.write("a", b"1234", 100)
    assert place.read("a") == b"1234"
    assert [(entry.name, entry.size) for entry in place.entries()] == [("a", 4)]
    place.remove("a")
    place.remove("a")
    assert place.entries() == []


def test_what_was_used_longest_ago_goes_first(place):
    for name in "abc":
        place.write(name, b"x" * 10, 30)
    place.touch("a")
    place.write("d", b"x" * 10, 30)
    assert names(place) == ["a", "c", "d"]
    place.write("e", b"x" * 20, 30)
    assert names(place) == ["d", "e"]


def test_a_name_that_others_begin_like_is_left_alone(place):
    place.write("a", b"x", 100)
    place.write("ab", b"x", 100)
    place.touch("ab")
    place.remove("a")
    assert names(place) == ["ab"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))), st.integers(0, 200))
def test_the_rest_fits_and_nothing_goes_that_need_not(files, room):
    entries = [Entry(str(n), size, used) for n, (size, used) in enumerate(files)]
    gone = doomed(entries, room)
    kept = [entry for entry in entries if entry not in gone]
    assert sum(entry.size for entry in kept) <= room
    if gone:
        assert sum(entry.size for entry in [*kept, gone[-1]]) > room
        assert max(entry.used for entry in gone) <= min((e.used for e in kept), default=9)


def test_what_a_killed_writer_left_is_never_seen_and_cleared_at_the_next_write(tmp_path):
    place = LocalPlace(tmp_path)
    place.write("a", b"whole", 100)
    (tmp_path / ".b.kvfold.x1y2.tmp").write_bytes(b"ha")
    assert names(place) == ["a"]
    assert place.read("b") is None
    place.write("c", b"whole", 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a.kvfold", "c.kvfold"]


def own(name):
    """A form of name, as a store has one."""
    return name.startswith("own-")


def strangers(folder):
    """What a store must leave alone, each with its kind: by foreign names, and by its own."""
    folder.mkdir(exist_ok=True)
    (folder / "outside").write_bytes(b"x" * 50)
    (folder / "letter.kvfold").write_bytes(b"x" * 90)
    (folder / ".letter.kvfold.part.tmp").write_bytes(b"x")
    (folder / ".notes.tmp").write_bytes(b"x")
    for name in ("other", "own-folder"):
        (folder / f"{name}.kvfold").mkdir()
    for name in ("other-link", "own-link"):
        (folder / f"{name}.kvfold").symlink_to(folder / "outside")
    (folder / "own-dangling.kvfold").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "own-pipe.kvfold")
    return sorted(path.name for path in folder.iterdir())


def test_only_the_stores_own_regular_files_are_counted_read_and_dropped(tmp_path):
    before = strangers(tmp_path)
    place = place_at(tmp_path, own)
    for number in range(4):
        place.write(f"own-{number}", b"x" * 10, 30)
    assert names(place) == ["own-1", "own-2", "own-3"]
    for name in ("own-folder", "own-link", "own-dangling", "own-pipe"):
        assert place.read(name) is None
    kept = {".lock", "own-1.kvfold", "own-2.kvfold", "own-3.kvfold"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*before, *kept})


@pytest.mark.parametrize("kind", ["folder", "link", "dangling", "pipe"])
def test_what_lies_under_a_name_that_is_needed_is_moved_aside(kind, tmp_path, caplog):
    strangers(tmp_path)
    place = place_at(tmp_path, own)
    place.write(f"own-{kind}", b"content", 100)
    assert place.read(f"own-{kind}") == b"content"
    assert names(place) == [f"own-{kind}"]
    (aside,) = tmp_path.glob(f"own-{kind}.kvfold.aside-*")
    assert f"moved aside as {aside.name}" in caplog.text
    assert (tmp_path / "outside").read_bytes() == b"x" * 50


def test_files_by_foreign_names_at_a_url_are_left_alone():
    pytest.importorskip("fsspec")
    url = f"memory://store-{time.time_ns()}"
    place_at(url).write("letter", b"x" * 90, 100)
    place = place_at(url, own)
    for number in range(4):
        place.write(f"own-{number}", b"x" * 10, 30)
    assert names(place) == ["own-1", "own-2", "own-3"]
    assert names(place_at(url)) == ["letter", "own-1", "own-2", "own-3"]


def test_a_place_that_takes_files_is_made_and_left_empty(place):
    place.check_writable()
    assert place.entries() == []
    if isinstance(place, LocalPlace):
        assert [path.name for path in place.folder.iterdir()] in ([], [".lock"])


def test_a_place_that_takes_no_files_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"x")
    for folder, told in [
        (tmp_path / "link", "a link to nothing"),
        (tmp_path / "file" / "below", "Not a directory"),
        (Path("/proc/self"), "files can be written to"),  # not even by root
    ]:
        if folder.parent.exists():
            with pytest.raises(SnapshotError, match=told):
                place_at(folder).check_writable()


def test_a_writer_killed_at_any_moment_leaves_whole_files_and_no_lock(tmp_path):
    running = writer(tmp_path, "killed", 60)
    while not any(tmp_path.glob("*.kvfold")):
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    place = LocalPlace(tmp_path)
    assert place.entries()
    for entry in place.entries():
        assert place.read(entry.name) == entry.name.encode() * 20000
    place.write("after", b"x", 600_000)
    assert not any(tmp_path.glob(".*.tmp"))


def test_two_processes_write_at_once_within_one_budget(tmp_path):
    both = [writer(tmp_path, who, 1.0) for who in ("one", "two")]
    for running in both:
        output, errors = running.communicate(timeout=120)
        assert running.returncode == 0, errors
        assert output.startswith("done")
    found = LocalPlace(tmp_path).entries()
    assert 0 < sum(entry.size for entry in found) <= 600_000
    assert not any(tmp_path.glob(".*.tmp"))


def test_a_file_in_the_place_of_a_store_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(SnapshotError, match="is a folder"):
        place_at(tmp_path / "file")


def test_an_unknown_kind_of_url_is_refused():
    pytest.importorskip("fsspec")
    with pytest.raises(SnapshotError, match="fsspec can open"):
        place_at("nonsense://folder")


def test_a_url_without_fsspec_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError, match=r"kvfold\[remote\]"):
        place_at("s3://bucket/folder")
