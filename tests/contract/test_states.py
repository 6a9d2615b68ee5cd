"""Rows leave a cache in plain form and enter another, and nobody notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.errors import CacheError
from kvfold.runtime.attach import attach
from kvfold.runtime.state import RowState, compacted
from kvfold.store.snapshot import Snapshot

CASES = [
    ("llama", "csa2-joint", {"resident": "shared"}),
    ("llama", "latent+k8v4", {"resident": "expanded"}),
    ("qwen2", "pool-head-overlap", {}),
    ("qwen3", "mixed", {}),
    ("smollm3", "two-codes", {"resident": "shared"}),
    ("phi3", "latent+pool+k8v4", {"resident": "absorbed"}),
    ("mistral", "drop-4", {}),
    ("qwen3", "every-fourth", {"prefill_attention": "exact"}),
    ("qwen3_5", "latent", {"resident": "absorbed"}),
    ("qwen3_5", "ced-csa2+pool", {"resident": "expanded"}),
    ("qwen3_5", "every-fourth", {"resident": "auto"}),
    ("gemma3", "pool+k8v4", {}),
    ("gemma3", "every-fourth", {}),
]
"""A family, a method, and the plan's other keys: every kind of store and of layer at least once."""
each_case = pytest.mark.parametrize(
    ("arch", "method", "keys"), CASES, ids=[f"{arch}-{method}" for arch, method, _ in CASES]
)


def assert_equal_states(ours: Any, theirs: Any) -> None:
    """Bit by bit."""
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert list(ours.tensors) == list(theirs.tensors)
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[name]), name


@each_case
def test_a_restored_cache_is_the_same_bit_by_bit_and_goes_on_folding(
    case: Any, helpers: Any, arch: str, method: str, keys: dict[str, Any]
) -> None:
    """One token at a time and a turn of several; a text of 3 tokens has left its rings empty."""
    made = case(arch, method, **keys)
    length = 3 if method in ("mixed", "every-fourth", "two-codes") else 33
    ids = helpers.tokens(length + 15)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        made.run(ids[:, :length], cache)
        states = attachment.rows_of(cache)
        restored = attachment.cache_from(states)
        bytes_now, bytes_before = restored.nbytes().components, cache.nbytes().components
        # transformers' sliding layers hold on to more of a prompt than their window
        assert bytes_now.pop("plain") <= bytes_before.pop("plain")
        assert bytes_now == bytes_before
        assert helpers.storages(restored) == restored.nbytes().total
        assert restored.token_ids() == ids[0, :length].tolist()
        pieces = [*ids[:, length : length + 6].split(1, dim=1), ids[:, length + 6 :]]
        for piece in pieces:
            assert torch.equal(made.run(piece, cache), made.run(piece, restored))
        assert_equal_states(attachment.rows_of(cache)[0], attachment.rows_of(restored)[0])
        assert_equal_states(states[0], attachment.rows_of(attachment.cache_from(states))[0])


@each_case
def test_rows_leave_a_batch_and_join_another(
    case: Any, helpers: Any, arch: str, method: str, keys: dict[str, Any]
) -> None:
    """A row of a padded batch and one that ran alone go on together as each would by itself."""
    made = case(arch, method, **keys)
    prompts = [helpers.tokens(n, seed=n) for n in (5, 19, 30)]
    newcomer = helpers.tokens(41, seed=5)
    steps = helpers.tokens(5, rows=3, seed=1)
    with made.attach() as attachment:
        batch, alone = attachment.new_cache(), attachment.new_cache()
        ids, mask = helpers.padded(prompts)
        made.run(ids, batch, mask)
        made.run(newcomer, alone)
        states = [*attachment.rows_of(batch, [2, 0]), *attachment.rows_of(alone, copy=False)]
        joined = attachment.cache_from(states)
        assert joined.seen_tokens == [30, 5, 41]
        together = []
        for number, column in enumerate(steps.split(1, dim=1)):
            mask = torch.cat([joined.attention_mask(), torch.ones(3, 1, dtype=torch.long)], dim=1)
            together.append(made.run(column, joined, mask if number % 2 else None))
        for row, prompt in enumerate([prompts[2], prompts[0], newcomer]):
            single = attachment.new_cache()
            made.run(prompt, single)
            logits = [made.run(column, single) for column in steps[row : row + 1].split(1, dim=1)]
            ours, theirs = helpers.state(joined, row), helpers.state(single)
            flipped = helpers.assert_same_state(ours, theirs)
            expected = torch.cat(logits, dim=1)[0]
            own = torch.cat(together, dim=1)[row]
            helpers.assert_same(own, expected, helpers.tolerance(flipped))
            assert joined.token_ids(row) == prompt[0].tolist() + steps[row].tolist()


@each_case
def test_a_batch_comes_back_from_disk_bit_by_bit(
    case: Any, helpers: Any, arch: str, method: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Rows of unequal length in one file, which holds what the plan keeps and little more."""
    made = case(arch, method, dtype=torch.float32, **keys)
    ids, mask = helpers.padded([helpers.tokens(n, seed=n) for n in (6, 31)])
    with made.attach() as attachment:
        cache = attachment.new_cache()
        made.run(ids, cache, mask)
        size = Snapshot.of(cache).save(tmp_path / "batch.kvfold")
        restored = Snapshot.load(tmp_path / "batch.kvfold", attachment).restore(attachment)
        before, after = attachment.rows_of(cache), attachment.rows_of(restored)
        assert restored.seen_tokens == [6, 31]
        for ours, theirs in zip(after, before, strict=True):
            assert_equal_states(ours, theirs)
        tensors = sum(state.nbytes() + 4 * state.seen_tokens for state in before)
        count = sum(len(state.tensors) + 1 for state in before)
        assert tensors < size < tensors + 120 * count + 4096
        assert torch.isfinite(made.run(torch.full((2, 1), 9), restored)).all()


@pytest.mark.parametrize(
    ("arch", "method", "short"),
    [
        ("llama", "csa2-joint", True),
        ("qwen2", "latent+pool", False),
        ("qwen3_5", "ced-csa2+pool", True),
    ],
)
def test_what_follows_from_codes_is_not_written_and_made_again(
    case: Any, helpers: Any, arch: str, method: str, short: bool, tmp_path: Path
) -> None:
    """Expanded layers cost a file no more than shared ones, and are the same bit by bit.

    A prompt that went through layers of their own code in chunks of a tiny window made its slots
    by ones and twos, which are rounded in another way than many at once: those are written.
    """
    made = case(arch, method, resident="expanded")
    ids = helpers.tokens(70)
    with attach(made.model, made.addon, plan=made.plan, keep_codes=True) as attachment:
        cache = attachment.new_cache()
        made.run(ids[:, :60], cache)
        assert helpers.storages(cache) == cache.nbytes().total
        whole, size = attachment.rows_of(cache)[0], Snapshot.of(cache).save(tmp_path / "a.kvfold")
        restored = Snapshot.load(tmp_path / "a.kvfold", attachment).restore(attachment)
        assert_equal_states(attachment.rows_of(restored)[0], whole)
        for column in ids[:, 60:].split(1, dim=1):
            assert torch.equal(made.run(column, restored), made.run(column, cache))
    if not short:
        return
    with made.attach(resident="shared") as attachment:
        shared = attachment.new_cache()
        made.run(ids[:, :60], shared)
        ledger = shared.nbytes()
        waiting = 8 * 200 * 60
        assert size < ledger.total - ledger["unused"] + waiting + 120 * len(whole.tensors) + 4096
        assert size < whole.nbytes()


def test_slots_that_codes_would_not_give_again_bit_by_bit_are_written(
    case: Any, helpers: Any, tmp_path: Path
) -> None:
    """One bit of one layer is off, as rounding can leave it: that layer's slots alone stay."""
    made = case("llama", "csa2-joint", resident="expanded")
    with attach(made.model, made.addon, plan=made.plan, keep_codes=True) as attachment:
        cache = attachment.new_cache()
        made.run(helpers.tokens(60), cache)
        short = compacted(attachment, attachment.rows_of(cache)[0])
        assert not any("slots" in name for name in short.tensors if name.startswith("layers."))
        layer = cache.folded_layer(max(cache.folded))
        layer.values[0, 0, layer.exact_places, 0] += 1e-12
        whole = attachment.rows_of(cache)[0]
        kept = {name for name in compacted(attachment, whole).tensors if ".slots." in name}
        name = f"layers.{layer.fold.index}.slots"
        assert {n for n in kept if n.startswith("layers.")} == {f"{name}.keys", f"{name}.values"}
        Snapshot.of(cache).save(tmp_path / "a.kvfold")
        restored = Snapshot.load(tmp_path / "a.kvfold", attachment).restore(attachment)
        assert_equal_states(attachment.rows_of(restored)[0], whole)


def test_without_anchors_and_window_the_codes_suffice_too(case: Any, helpers: Any) -> None:
    """Nothing waits to become visible then."""
    made = case("llama", "csa2-joint", resident="expanded", anchors=0, window=0)
    with attach(made.model, made.addon, plan=made.plan, keep_codes=True) as attachment:
        cache = attachment.new_cache()
        made.run(helpers.tokens(60), cache)
        (whole,) = attachment.rows_of(cache)
        short = compacted(attachment, whole)
        assert short.nbytes() < whole.nbytes()
        assert_equal_states(attachment.rows_of(attachment.cache_from([short]))[0], whole)


def test_half_of_a_layers_slots_is_not_enough(case: Any, helpers: Any) -> None:
    """Both are left out, or neither."""
    made = case("llama", "csa2-joint", resident="expanded")
    with attach(made.model, made.addon, plan=made.plan, keep_codes=True) as attachment:
        cache = attachment.new_cache()
        made.run(helpers.tokens(60), cache)
        (state,) = attachment.rows_of(cache)
        gone = next(name for name in state.tensors if name.endswith(".slots.values"))
        tensors = {name: tensor for name, tensor in state.tensors.items() if name != gone}
        with pytest.raises(CacheError, match="is missing"):
            attachment.cache_from([RowState(state.token_ids, tensors)])


def test_spare_codes_can_be_let_go(case: Any, helpers: Any) -> None:
    """A cache without them goes on as before, and is as large as one that never had any."""
    made = case("llama", "csa2-joint", resident="expanded")
    ids = helpers.tokens(66)
    with attach(made.model, made.addon, plan=made.plan, keep_codes=True) as attachment:
        cache, other = attachment.new_cache(), attachment.new_cache()
        for each in (cache, other):
            made.run(ids[:, :60], each)
        cache.forget_spare_codes()
        assert torch.equal(made.run(ids[:, 60:], cache), made.run(ids[:, 60:], other))
        size = cache.nbytes().components
    with made.attach() as attachment:
        never = attachment.new_cache()
        made.run(ids[:, :60], never)
        made.run(ids[:, 60:], never)
        assert size == never.nbytes().components


def test_pads_between_tokens_are_left_behind(case: Any, helpers: Any) -> None:
    """A row of a conversation that waited for longer turns of others keeps no trace of the wait."""
    made = case("qwen3", "every-fourth")
    first, second = helpers.tokens(20, seed=2), helpers.tokens(3, seed=3)
    with made.attach() as attachment:
        cache, alone = attachment.new_cache(), attachment.new_cache()
        ids, mask = helpers.padded([first, helpers.tokens(26)])
        made.run(ids, cache, mask)
        ids, added = helpers.padded([second, helpers.tokens(8)])
        made.run(ids, cache, torch.cat([mask, added], dim=1))
        for part in (first, second):
            made.run(part, alone)
        state, single = attachment.rows_of(cache, [0])[0], attachment.rows_of(alone)[0]
        assert state.tensors["layers.0.keys"].shape == single.tensors["layers.0.keys"].shape
        restored, step = attachment.cache_from([state]), torch.full((1, 1), 9)
        helpers.assert_same(made.run(step, restored), made.run(step, alone))


@pytest.mark.parametrize("method", ["ced", "ced-csa2+k8v4", "latent+pool+k8v4", "over-lower"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_a_skipped_prompt_is_restored_with_its_states(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """Also where upper layers have had no tokens but anchors and the replayed ones."""
    made = case(arch, method, prefill="skip", replay=11)
    ids = helpers.tokens(44)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        helpers.last(made.model, ids[:, :33], cache)
        restored = attachment.cache_from(attachment.rows_of(cache))
        for column in ids[:, 33:].split(1, dim=1):
            ours, theirs = (made.run(column, held) for held in (restored, cache))
            assert torch.equal(ours, theirs)


def test_a_state_is_not_touched_by_what_its_cache_does_next(case: Any, helpers: Any) -> None:
    made = case("llama", "latent+pool")
    with made.attach() as attachment:
        cache = attachment.new_cache()
        made.run(helpers.tokens(30), cache)
        (state,) = attachment.rows_of(cache)
        before = state.copied()
        restored = attachment.cache_from([state])
        for held in (cache, restored):
            made.run(helpers.tokens(12, seed=9), held)
        assert_equal_states(state, before)


def test_tokens_that_came_as_embeddings_have_no_ids(case: Any, helpers: Any) -> None:
    made = case("llama", "latent")
    with made.attach() as attachment, torch.no_grad():
        cache = attachment.new_cache()
        embedded = made.model.get_input_embeddings()(helpers.tokens(3))
        made.model(inputs_embeds=embedded, **helpers.cache_argument(cache))
        made.run(torch.full((1, 1), 9), cache)
        assert cache.token_ids() == [-2, -2, -2, 9]


def test_a_cropped_cache_forgets_the_ids_too(case: Any, helpers: Any) -> None:
    made = case("llama", "latent", window=30)
    ids = helpers.tokens(12)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        made.run(ids, cache)
        cache.crop(-4)
        assert cache.token_ids() == ids[0, :8].tolist()
        assert attachment.rows_of(cache)[0].seen_tokens == 8
        cache.reset()
        assert cache.token_ids() == []


@pytest.mark.parametrize("fault", ["missing", "more", "shape", "dtype", "other plan"])
def test_a_state_that_the_plan_could_not_have_left_is_refused(
    case: Any, helpers: Any, fault: str
) -> None:
    """Whatever a file says, nothing enters a cache that would be read as something else."""
    made = case("llama", "latent+pool")
    with made.attach(window=12 if fault == "other plan" else 8) as attachment:
        cache = attachment.new_cache()
        made.run(helpers.tokens(30), cache)
        (state,) = attachment.rows_of(cache)
    tensors = dict(state.tensors)
    name = "layers.2.keys"
    if fault == "missing":
        del tensors[name]
    elif fault == "more":
        tensors["layers.99.keys"] = tensors[name]
    elif fault == "shape":
        tensors[name] = tensors[name][:, 1:]
    elif fault == "dtype":
        tensors[name] = tensors[name].float()
    wrong = type(state)(state.token_ids, tensors)
    with made.attach() as attachment, pytest.raises(CacheError, match="a row of 30 tokens"):
        attachment.cache_from([wrong])


def test_rows_of_a_foreign_cache_are_refused(case: Any, helpers: Any) -> None:
    made = case("llama", "latent")
    with made.attach() as attachment:
        cache = attachment.new_cache()
        made.run(helpers.tokens(9), cache)
    with made.attach() as attachment, pytest.raises(CacheError, match="another attachment"):
        attachment.rows_of(cache)
