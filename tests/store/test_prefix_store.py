"""A store gives the longest prefix that it has of a text, and never one of another text."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.errors import SnapshotError
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.store.addon import AddOn
from kvfold.store.identity import Identity
from kvfold.store.prefix_store import (
    PrefixStore,
    _Chain,
    names_like,
    resumes_as_cold,
    short_names,
    tokens_of,
)

KEYS = {"window": 8, "bits": [{"method": "turboquant", "layers": [0, 1, 2, 3, 4, 5]}]}
SYSTEM = list(range(3, 40))
"""37 tokens: two blocks of 16, and five more."""


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Any:
    return tiny_model("llama")


@pytest.fixture
def attachment(model: Any) -> Any:
    with attach(model, AddOn.untrained(model, Plan.from_dict(KEYS))) as made:
        yield made


@pytest.fixture
def store(tmp_path: Any) -> PrefixStore:
    return PrefixStore(tmp_path / "store", max_bytes=10**7, block=16)


def run(attachment: Any, ids: list[int], cache: Any = None) -> Any:
    cache = attachment.new_cache() if cache is None else cache
    with torch.no_grad():
        attachment.model(torch.tensor([ids]), cache=cache)
    return cache


def keep(store: PrefixStore, attachment: Any, ids: list[int]) -> str:
    name = store.keep(run(attachment, ids))
    assert name is not None
    return name


def test_the_longest_prefix_is_found_and_goes_on(store: Any, attachment: Any) -> None:
    """At a border of blocks, between two, and below one whose tokens differ."""
    for length in (16, 20, 32, 37):
        keep(store, attachment, SYSTEM[:length])
    keep(store, attachment, [*SYSTEM[:33], 90, 91])
    for text, tokens in [
        ([*SYSTEM, 50, 51], 37),
        (SYSTEM, 32),
        (SYSTEM[:33], 32),
        ([*SYSTEM[:31], 99, 99], 20),
        ([*SYSTEM[:33], 90, 91, 92], 35),
        ([*SYSTEM[:18], 99], 16),
    ]:
        found = store.longest(attachment, text)
        assert found is not None
        assert found.tokens == tokens
        assert found.state.token_ids.tolist() == text[:tokens]
    found = store.longest(attachment, [*SYSTEM, 50, 51])
    resumed = attachment.cache_from([found.state])
    cold = run(attachment, SYSTEM)
    for cache in (resumed, cold):
        run(attachment, [50], cache)
    ours, theirs = attachment.rows_of(resumed)[0], attachment.rows_of(cold)[0]
    assert all(torch.equal(t, theirs.tensors[name]) for name, t in ours.tensors.items())


def test_other_texts_find_nothing(store: Any, attachment: Any) -> None:
    keep(store, attachment, SYSTEM)
    assert store.longest(attachment, [4, *SYSTEM[1:], 50]) is None
    assert store.longest(attachment, SYSTEM[:36]) is None
    assert store.longest(attachment, [*SYSTEM[:36], 99, 50]) is None
    assert store.longest(attachment, []) is None


def test_the_whole_text_is_found_only_where_nothing_must_be_left(
    store: Any, attachment: Any
) -> None:
    keep(store, attachment, SYSTEM)
    assert store.longest(attachment, SYSTEM) is None
    found = store.longest(attachment, SYSTEM, leave=0)
    assert found is not None
    assert found.tokens == 37


IDENTITY = Identity("m", "a", "b", {}, "float32", {})
texts = st.lists(st.integers(0, 2), max_size=40)


@given(texts, texts, st.integers(0, 40), st.integers(1, 9))
def test_names_are_equal_for_equal_prefixes_only(
    one: list[int], other: list[int], shared: int, block: int
) -> None:
    other = one[:shared] + other
    chains = [_Chain(IDENTITY, np.asarray(text, dtype="<i4"), block) for text in (one, other)]
    for tokens in range(min(len(one), len(other)) + 1):
        names = [chain.name(tokens) for chain in chains]
        assert tokens_of(names[0]) == tokens
        assert (names[0] == names[1]) == (one[:tokens] == other[:tokens])
        assert chains[1].name_fits(names[0], tokens) == (names[0] == names[1])


def test_only_names_of_the_stores_form_are_its_own() -> None:
    name = _Chain(IDENTITY, np.arange(20, dtype="<i4"), 16).name(20)
    assert tokens_of(name) == 20
    for other in ("a-20-b", "letter", name[:-1], name.upper(), f"{name}0", name.replace("-", "_")):
        assert tokens_of(other) is None


def test_short_names_tell_snapshots_with_one_beginning_apart() -> None:
    chain = _Chain(IDENTITY, np.arange(31, dtype="<i4"), 16)
    names = [chain.name(tokens) for tokens in range(16, 31)]
    assert len({name[:32] for name in names}) == 1
    short = short_names(names, 6)
    assert {len(text) for text in short.values()} == {6}
    assert all(names_like(names, short[name]) == [name] for name in names)
    assert names_like(names, names[3][:20]) == names
    alike = [f"{'0' * 32}-00000020-{'ab' * 15}{end}" for end in ("00", "01", "11")]
    assert list(short_names(alike, 6).values()) == [name[-32:] for name in alike]
    assert short_names([], 6) == {}


def test_a_folder_under_the_name_of_a_prompt_costs_no_more_than_one_reading(
    store: Any, attachment: Any
) -> None:
    name = keep(store, attachment, SYSTEM)
    store.place.path(name).unlink()
    store.place.path(name).mkdir()
    assert store.longest(attachment, [*SYSTEM, 50]) is None
    assert keep(store, attachment, SYSTEM) == name
    assert store.longest(attachment, [*SYSTEM, 50]).tokens == 37


def test_another_maker_finds_nothing(store: Any, attachment: Any, model: Any) -> None:
    keep(store, attachment, SYSTEM)
    attachment.detach()
    plan = Plan.from_dict({**KEYS, "window": 9})
    with attach(model, AddOn.untrained(model, plan)) as other:
        assert store.longest(other, [*SYSTEM, 50]) is None
    assert len(store.place.entries()) == 1


@pytest.mark.parametrize("fault", ["flipped", "truncated", "empty", "foreign", "other tokens"])
def test_a_bad_file_is_dropped_with_a_warning_and_the_next_shorter_one_serves(
    store: Any, attachment: Any, fault: str, caplog: Any
) -> None:
    keep(store, attachment, SYSTEM[:16])
    name = keep(store, attachment, SYSTEM)
    path = store.place.path(name)
    content = bytearray(path.read_bytes())
    if fault == "flipped":
        content[len(content) // 2] ^= 1
    elif fault == "truncated":
        del content[-100:]
    elif fault == "empty":
        content.clear()
    elif fault == "foreign":
        other = keep(PrefixStore(store.place.folder / "x", block=16), attachment, SYSTEM[:20])
        content = bytearray((store.place.folder / "x" / f"{other}.kvfold").read_bytes())
    else:
        other = keep(store, attachment, [4, *SYSTEM[1:]])
        content = bytearray(store.place.path(other).read_bytes())
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="kvfold"):
        found = store.longest(attachment, [*SYSTEM, 50])
    assert found is not None
    assert found.tokens == 16
    assert not path.exists()
    assert f"dropped the stored cache {name}" in caplog.text
    assert keep(store, attachment, SYSTEM) == name
    assert store.longest(attachment, [*SYSTEM, 50]).tokens == 37


def test_a_file_that_vanishes_while_it_is_looked_up_is_a_miss(
    store: Any, attachment: Any, monkeypatch: Any
) -> None:
    keep(store, attachment, SYSTEM)
    entries = store.place.entries()
    store.place.remove(entries[0].name)
    monkeypatch.setattr(store.place, "entries", lambda: entries)
    assert store.longest(attachment, [*SYSTEM, 50]) is None


def test_a_hit_counts_as_use_when_room_is_made(tmp_path: Any, attachment: Any) -> None:
    first = PrefixStore(tmp_path, block=16)
    keep(first, attachment, SYSTEM)
    size = first.place.entries()[0].size
    store = PrefixStore(tmp_path, max_bytes=2 * size + 100, block=16)
    keep(store, attachment, [4, *SYSTEM[1:]])
    assert store.longest(attachment, [*SYSTEM, 50]) is not None
    keep(store, attachment, [5, *SYSTEM[1:]])
    assert store.longest(attachment, [*SYSTEM, 50]) is not None
    assert store.longest(attachment, [4, *SYSTEM[1:], 50]) is None


def test_what_is_kept_already_is_not_written_again(store: Any, attachment: Any) -> None:
    name = keep(store, attachment, SYSTEM)
    before = store.place.path(name).stat()
    time.sleep(0.01)
    assert keep(store, attachment, SYSTEM) == name
    after = store.place.path(name).stat()
    assert after.st_ino == before.st_ino
    assert after.st_mtime_ns > before.st_mtime_ns


def test_what_is_not_worth_keeping_or_has_no_room_is_not_kept(
    store: Any, attachment: Any, caplog: Any
) -> None:
    assert store.keep(run(attachment, SYSTEM[:15])) is None
    embedded = attachment.new_cache()
    with torch.no_grad():
        attachment.model(inputs_embeds=torch.zeros(1, 20, 32), cache=embedded)
    assert store.keep(embedded) is None
    small = PrefixStore(store.place.folder, max_bytes=1000, block=16)
    with caplog.at_level(logging.WARNING, logger="kvfold"):
        assert small.keep(run(attachment, SYSTEM)) is None
    assert "the store at most 1000" in caplog.text
    assert store.place.entries() == []


def test_a_store_at_a_url_serves_too(attachment: Any) -> None:
    pytest.importorskip("fsspec")
    store = PrefixStore(f"memory://store-{time.time_ns()}/deep", block=16)
    keep(store, attachment, SYSTEM)
    found = store.longest(attachment, [*SYSTEM, 50])
    assert found is not None
    assert found.tokens == 37


def test_a_store_without_room_or_blocks_is_refused(tmp_path: Any) -> None:
    with pytest.raises(SnapshotError, match="at least 1"):
        PrefixStore(tmp_path, block=0)


def test_only_folded_prefills_of_all_layers_resume_as_cold() -> None:
    assert resumes_as_cold(Plan())
    assert not resumes_as_cold(Plan(prefill_attention="exact"))
