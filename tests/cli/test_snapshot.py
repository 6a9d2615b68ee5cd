"""`kvfold snapshot`."""

from __future__ import annotations

import json
import os
import re

import pytest

from kvfold.store.snapshot import Snapshot


@pytest.fixture
def make(kvfold, tiny_folder, addon_folder):
    def run(*more):
        return kvfold("snapshot", "make", tiny_folder, "--addon", addon_folder, "--raw", *more)

    return run


@pytest.fixture
def stored(make, tmp_path):
    """A store with two snapshots, of 100 and of 150 tokens."""
    for length in (100, 150):
        done = make("--prompt", "a" * length, "--store", tmp_path / "store")
        assert done.exit_code == 0, done.output
    return tmp_path / "store"


def test_a_prompt_is_kept_as_a_file_and_shown(make, kvfold, tmp_path):
    path = tmp_path / "a.kvfold"
    done = make("--prompt", "a" * 200, "--out", path, "--json")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["tokens"] == 200
    assert made["file_bytes"] == path.stat().st_size
    assert Snapshot.load(path).rows[0].seen_tokens == 200
    shown = kvfold("snapshot", "show", path)
    assert "200 tokens" in shown.stdout
    assert "float32" in shown.stdout
    plain = json.loads(kvfold("snapshot", "show", path, "--json").stdout)
    assert plain["rows"] == [200]


def test_a_longer_prompt_goes_on_from_the_store(make, kvfold, stored):
    done = make("--prompt", "a" * 180, "--store", stored)
    assert "The first 150 of them came from the store" in done.stdout
    rows = json.loads(kvfold("snapshot", "list", stored, "--json").stdout)
    assert rows[0]["tokens"] == 180
    table = kvfold("snapshot", "list", stored).stdout
    assert "3 snapshots" in table
    assert rows[0]["name"][-32:][:12] in table


def test_a_short_prompt_is_not_kept_in_a_store(make, tmp_path):
    done = make("--prompt", "short", "--store", tmp_path / "store")
    assert done.exit_code == 0
    assert "Not kept" in done.stdout


def test_damage_is_found_and_named(kvfold, stored):
    done = kvfold("snapshot", "verify", stored)
    assert done.exit_code == 0
    assert "2 whole, 0 damaged" in done.stdout
    path = next(stored.glob("*.kvfold"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    done = kvfold("snapshot", "verify", stored)
    assert done.exit_code == 2
    assert "1 whole, 1 damaged" in done.stdout
    results = json.loads(kvfold("snapshot", "verify", path, "--json").stdout)
    assert "checksum does not match" in results[0]["reason"]


def test_snapshots_are_removed_by_name_or_all(kvfold, stored):
    rows = json.loads(kvfold("snapshot", "list", stored, "--json").stdout)
    assert kvfold("snapshot", "rm", stored).exit_code == 2
    assert kvfold("snapshot", "rm", stored, "nonsense").exit_code == 2
    done = kvfold("snapshot", "rm", stored, rows[0]["name"][:14])
    assert "removed 1 of 2" in done.stdout
    assert "removed 1 of 1" in kvfold("snapshot", "rm", stored, "--all").stdout


def test_what_the_list_shows_is_what_rm_takes(make, kvfold, tmp_path):
    """Two prompts of one beginning, and with it of names that begin alike."""
    store = tmp_path / "store"
    for prompt in ("a" * 100, "a" * 110, "a" * 90 + "b" * 20):
        assert make("--prompt", prompt, "--store", store).exit_code == 0
    rows = json.loads(kvfold("snapshot", "list", store, "--json").stdout)
    assert len({row["name"][:32] for row in rows}) == 1
    cells = re.findall(r"│ ([0-9a-f]{12}) +│", kvfold("snapshot", "list", store).stdout)
    assert len(set(cells)) == 3
    assert kvfold("snapshot", "rm", store, rows[0]["name"][:12]).exit_code == 2
    assert "removed 1 of 3 snapshots" in kvfold("snapshot", "rm", store, cells[1]).stdout
    left = json.loads(kvfold("snapshot", "list", store, "--json").stdout)
    assert [row["name"] for row in left] == [rows[0]["name"], rows[2]["name"]]
    assert "removed 1 of 2 snapshots" in kvfold("snapshot", "rm", store, cells[0]).stdout
    assert "1 snapshot," in kvfold("snapshot", "list", store).stdout


def test_every_command_takes_the_store_as_make_does(kvfold, stored):
    """By the same option; where the store stands as an argument, it means the same."""
    listed = kvfold("snapshot", "list", "--store", stored, "--json").stdout
    assert listed == kvfold("snapshot", "list", stored, "--json").stdout
    name = json.loads(listed)[0]["name"]
    shown = kvfold("snapshot", "show", "--store", stored, name, "--json").stdout
    assert shown == kvfold("snapshot", "show", stored / f"{name}.kvfold", "--json").stdout
    assert "2 whole, 0 damaged" in kvfold("snapshot", "verify", "--store", stored).stdout
    done = kvfold("snapshot", "rm", name, "--store", stored)
    assert "removed 1 of 2" in done.stdout, done.output
    assert "removed 1 of 1" in kvfold("snapshot", "rm", "--store", stored, "--all").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["list"], "--store STORE"),
        (["list", "one", "--store", "other"], "say once which store"),
        (["verify"], "--store STORE"),
        (["verify", "--store", "nowhere"], "there is no store nowhere"),
        (["show", "--store", "nowhere", "3f"], "there is no store nowhere"),
        (["rm"], "--store STORE"),
        (["rm", "--store", "nowhere"], "say which to remove"),
        (["list", "--store", "s3://bucket"], "only folders and files of this machine"),
    ],
)
def test_a_store_must_be_named_once_and_be_there(kvfold, arguments, told):
    done = kvfold("snapshot", *arguments)
    assert done.exit_code == 2
    assert told in " ".join(done.output.replace("│", " ").split())


def test_pipes_and_folders_are_no_snapshots(kvfold, stored):
    pipe = stored / f"{next(stored.glob('*.kvfold')).stem[:-4]}0000.kvfold"
    os.mkfifo(pipe)
    (stored / "folder.kvfold").mkdir()
    assert "2 whole, 0 damaged" in kvfold("snapshot", "verify", stored).stdout
    assert len(json.loads(kvfold("snapshot", "list", stored, "--json").stdout)) == 2
    for command in ("verify", "show"):
        done = kvfold("snapshot", command, pipe)
        assert done.exit_code == 2
        assert "is a regular file" in " ".join(done.output.split())


@pytest.mark.parametrize("command", ["list", "rm", "verify", "show"])
def test_only_folders_of_this_machine_are_looked_at(kvfold, command):
    done = kvfold("snapshot", command, "s3://bucket/folder")
    assert done.exit_code == 2
    told = " ".join(done.output.replace("│", " ").split())
    assert "only folders and files of this machine" in told
    assert "s3://bucket/folder" in told


def test_a_file_that_is_too_long_is_not_called_cut_off(kvfold, stored):
    path = next(stored.glob("*.kvfold"))
    path.write_bytes(path.read_bytes() + b"x")
    told = kvfold("snapshot", "verify", path).stdout
    assert "something were written behind it" in " ".join(told.split())
    assert "cut off" not in told


def test_an_unusable_store_is_told_before_anything_is_loaded(kvfold, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    done = kvfold(
        "snapshot", "make", "no-such-model", "--addon", "none", "--prompt", "a",
        "--store", tmp_path / "link",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "a link to nothing" in " ".join(done.output.split())


def test_only_snapshots_are_removed_as_files(kvfold, stored, tmp_path):
    text = tmp_path / "letter.txt"
    text.write_text("dear")
    done = kvfold("snapshot", "rm", text)
    assert done.exit_code == 2
    assert text.exists()
    path = next(stored.glob("*.kvfold"))
    assert kvfold("snapshot", "rm", path).exit_code == 0
    assert not path.exists()


def test_where_to_keep_it_must_be_said(make):
    done = make("--prompt", "a")
    assert done.exit_code == 2
    assert "--out" in done.output


def test_a_missing_store_is_named(kvfold, tmp_path):
    done = kvfold("snapshot", "list", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "there is no store" in done.output


def test_help_teaches(kvfold):
    assert "longest known prefix" in " ".join(kvfold("snapshot", "--help").stdout.split())
    for name in ("make", "list", "show", "verify", "rm"):
        assert "Example: kvfold snapshot" in kvfold("snapshot", name, "--help").stdout
