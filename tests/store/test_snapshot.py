"""A cache on disk is what it was, or is refused with the reason."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import AttachError, SnapshotError
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.store.addon import AddOn
from kvfold.store.snapshot import Snapshot, describe_snapshot
from kvfold.store.snapshot_file import encode, read_header, read_tensors

DEPTH = {"method": "csa2", "source": 0, "readers": [1, 2]}
KEYS = {
    "window": 8,
    "depth": [DEPTH],
    "bits": [{"method": "turboquant", "layers": [0, 1, 2, 4]}],
    "resident": "shared",
}


def fitted(model: Any, seed: int = 0, **keys: Any) -> AddOn:
    """An add-on with random weights, so that every part shows."""
    addon = AddOn.untrained(model, Plan.from_dict({**KEYS, **keys}))
    generator = torch.Generator().manual_seed(seed)
    for weight in addon.parameters():
        drawn = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
        weight.data.copy_(drawn)
    return addon


def feed(model: Any, cache: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model(ids, cache=cache).logits


def ids(count: int, seed: int = 7) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (1, count), generator=generator)


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def content(model: Any) -> memoryview:
    """The file of a short text; a view, since hypothesis would print bytes whole."""
    with attach(model, fitted(model)) as attachment:
        cache = attachment.new_cache()
        feed(model, cache, ids(40))
        return memoryview(Snapshot.of(cache).to_bytes())


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_greedy_generation_goes_on_with_the_same_tokens(
    tiny_model: Any, cache_argument: Any, family: str, tmp_path: Any
) -> None:
    """After a restart: the model's class, the add-on and the attachment are made anew."""
    keys = {} if family == "llama" else {
        "depth": [{"method": "latent", "layers": [3, 7], "rank": 12}],
        "bits": [{"method": "turboquant", "layers": [3, 7]}],
        "sequence": [{"method": "pool", "layers": [3, 7]}],
    }  # fmt: skip
    text = ids(50)

    def go_on(model: Any, cache: Any) -> Any:
        wanted = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "min_new_tokens": 16}
        return model.generate(text, **wanted, **cache_argument(model, cache))

    model = tiny_model(family)
    with attach(model, fitted(model, **keys)) as attachment:
        cache = attachment.new_cache()
        feed(model, cache, text[:, :-1])
        Snapshot.of(cache).save(tmp_path / "text.kvfold")
        expected = go_on(model, cache)
    model = tiny_model(family)
    with attach(model, fitted(model, **keys)) as attachment:
        restored = Snapshot.load(tmp_path / "text.kvfold", attachment).restore(attachment)
        assert restored.token_ids() == text[0, :-1].tolist()
        assert torch.equal(go_on(model, restored), expected)


def test_a_file_has_the_bytes_of_the_ledger_and_a_small_header(model: Any) -> None:
    with attach(model, fitted(model)) as attachment:
        cache = attachment.new_cache()
        feed(model, cache, ids(300))
        size = len(Snapshot.of(cache).to_bytes())
        ledger = cache.nbytes()
    kept = ledger.total - ledger["unused"]
    names = 2 * len(cache.layers) + 12
    assert kept < size < kept + 4 * 300 + 120 * names + 2048


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), near=st.integers(0, 3))
def test_a_flipped_byte_anywhere_is_refused(
    content: memoryview, place: float, flip: int, near: int
) -> None:
    """In the length, the header, its padding, the checksum, and in any tensor."""
    end = 8 + int.from_bytes(content[:8], "little")
    spans = [(0, len(content)), (0, end), (end - 16, end + 16), (0, 16)]
    first, last = spans[near]
    changed = bytearray(content)
    changed[first + int(place * (last - first))] ^= flip
    with pytest.raises(SnapshotError):
        Snapshot.from_bytes(bytes(changed))


@settings(max_examples=60, deadline=None)
@given(kept=st.floats(0, 1, exclude_max=True), short=st.booleans())
def test_a_truncated_file_is_refused(content: memoryview, kept: float, short: bool) -> None:
    length = int(kept * (2000 if short else len(content)))
    with pytest.raises(SnapshotError, match="whole file"):
        Snapshot.from_bytes(content[:length])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(content: bytes) -> None:
    for made in (content, len(content).to_bytes(8, "little") + content):
        with pytest.raises(SnapshotError):
            Snapshot.from_bytes(made)


def test_a_file_that_goes_on_is_refused(content: memoryview) -> None:
    with pytest.raises(SnapshotError, match="must have"):
        Snapshot.from_bytes(bytes(content) + b"\0")


def test_a_length_that_the_file_does_not_have_reserves_no_memory() -> None:
    header = b'{"x":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    with pytest.raises(SnapshotError, match="header"):
        Snapshot.from_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 12}, "of its plan window was 8 and is 12"),
        ({"resident": "expanded"}, "of its plan resident was 'shared'"),
        ({"seed": 1}, "an add-on of the same plan and other weights"),
        ({"model": 1}, "other weights or another shape"),
        ({"dtype": torch.float64}, "made in float32, and the model is in float64"),
    ],
)
def test_another_maker_is_refused_with_the_reason(
    tiny_model: Any, content: memoryview, changes: dict[str, Any], reason: str
) -> None:
    seed, weights = changes.pop("seed", 0), changes.pop("model", 0)
    model = tiny_model("llama", dtype=changes.pop("dtype", torch.float32), seed=weights)
    with attach(model, fitted(model, seed, **changes)) as attachment:
        with pytest.raises(SnapshotError, match=reason):
            Snapshot.from_bytes(content, attachment)
        with pytest.raises(SnapshotError, match=reason):
            Snapshot.from_bytes(content).restore(attachment)


def test_another_reading_of_an_automatic_plan_is_refused(model: Any, monkeypatch: Any) -> None:
    """`resident: auto` looks at what memory is free, so one plan may store different things."""
    keys = {"bits": [], "resident": "auto"}
    with attach(model, fitted(model, **keys)) as attachment:
        cache = attachment.new_cache()
        feed(model, cache, ids(30))
        made = Snapshot.of(cache)
    monkeypatch.setattr("kvfold.runtime.attach.free_memory", lambda device: 0)
    again = attach(model, fitted(model, **keys))
    with again, pytest.raises(SnapshotError, match="read as expanded and are now read as shared"):
        made.restore(again)


def test_a_sealed_file_with_other_tensors_is_refused_before_they_are_read(
    model: Any, content: memoryview
) -> None:
    """A checksum is no proof of sense: what a row must hold follows from the plan."""
    header = read_header(io.BytesIO(content), len(content))
    file = io.BytesIO(content)
    file.seek(len(header.raw))
    tensors = read_tensors(header, file)
    tensors["rows.0.layers.0.keys"] = torch.zeros(2, 10**5, 16)
    forged = encode(header.description, tensors)
    with attach(model, fitted(model)) as attachment:
        with pytest.raises(SnapshotError, match="a row of 40 tokens must hold"):
            Snapshot.from_bytes(forged, attachment)
        with pytest.raises(SnapshotError, match="a row of 40 tokens must hold"):
            Snapshot.from_bytes(forged).restore(attachment)


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_another_format_is_refused(content: memoryview, version: Any) -> None:
    header = read_header(io.BytesIO(content), len(content))
    made = encode({**header.description, "format_version": version}, {"x": torch.zeros(1)})
    with pytest.raises(SnapshotError, match="format version 1"):
        Snapshot.from_bytes(made)


def test_one_row_of_a_batch_is_restored_alone(model: Any) -> None:
    with attach(model, fitted(model)) as attachment:
        cache = attachment.new_cache()
        feed(model, cache, torch.cat([ids(30, 1), ids(30, 2)]))
        made = Snapshot.of(cache)
        one = Snapshot.from_bytes(made.to_bytes()).restore(attachment, [1])
        assert one.token_ids() == ids(30, 2)[0].tolist()
        (row,) = Snapshot.of(cache, [1]).rows
        assert torch.equal(row.token_ids, ids(30, 2)[0].int())


def test_a_description_is_read_without_the_tensors(content: memoryview, tmp_path: Any) -> None:
    path = tmp_path / "text.kvfold"
    path.write_bytes(content)
    described = describe_snapshot(path)
    assert described.rows == (40,)
    assert described.identity.dtype == "float32"
    assert Plan.from_dict(dict(described.identity.plan)) == Plan.from_dict(KEYS)


def test_a_write_that_fails_leaves_what_was_there(
    content: memoryview, tmp_path: Any, monkeypatch: Any
) -> None:
    path = tmp_path / "text.kvfold"
    Snapshot.from_bytes(content).save(path)

    def fail(*names: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        Snapshot.from_bytes(content).save(path)
    assert [found.name for found in tmp_path.iterdir()] == ["text.kvfold"]
    assert Snapshot.load(path).rows[0].seen_tokens == 40


def test_a_missing_file_is_named(tmp_path: Any) -> None:
    with pytest.raises(SnapshotError, match=r"nothing\.kvfold can't be opened"):
        Snapshot.load(tmp_path / "nothing.kvfold")


def test_a_cache_without_an_attachment_is_refused() -> None:
    class Lost:
        owner = None

    with pytest.raises(AttachError, match="new_cache"):
        Snapshot.of(Lost())  # type: ignore[arg-type]
