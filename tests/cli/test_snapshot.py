"""`kvfold snapshot`."""

from __future__ import annotations

import json

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
    assert rows[0]["name"][:12] in table


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
