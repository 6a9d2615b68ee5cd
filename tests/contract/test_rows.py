"""Rows of a batch never notice each other, their padding, or what was run before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvfold.errors import AttachError


@pytest.mark.every_family
def test_left_padded_rows_equal_single_rows(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """Prompt, decode steps and a second padded turn of a batch equal each row run alone."""
    _check_padded_rows(case(arch, method, resident="auto"), helpers)


def test_left_padded_rows_equal_single_rows_after_an_exact_prefill(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """The same where the prompt's own queries see everything."""
    _check_padded_rows(case(arch, method, prefill_attention="exact", resident="auto"), helpers)


def _check_padded_rows(made: Any, helpers: Any) -> None:
    prompts = [helpers.tokens(n, seed=n) for n in (3, 19, 30)]
    steps = helpers.tokens(4, rows=3, seed=1)
    only_full = len(made.anatomy.foldable_layers) == made.anatomy.num_layers
    lengths = (6, 2, 9) if only_full else (7, 7, 7)
    turns = [helpers.tokens(n, seed=50 + n) for n in lengths]
    with made.attach() as attachment:
        cache = attachment.new_cache()
        ids, mask = helpers.padded(prompts)
        collected = [made.run(ids, cache, mask)]
        for column in range(4):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
            collected.append(made.run(steps[:, column : column + 1], cache, mask))
        ids, added = helpers.padded(turns)
        mask = torch.cat([mask, added], dim=1)
        collected.append(made.run(ids, cache, mask))
        together = torch.cat(collected, dim=1)
        for row, prompt in enumerate(prompts):
            alone = attachment.new_cache()
            single = [made.run(prompt, alone)]
            single += [made.run(steps[row : row + 1, c : c + 1], alone) for c in range(4)]
            single.append(made.run(turns[row], alone))
            real = together[row, mask[row].bool()]
            flipped = helpers.assert_same_state(helpers.state(cache, row), helpers.state(alone))
            tolerance = helpers.tolerance(flipped)
            helpers.assert_same(real, torch.cat(single, dim=1)[0], tolerance)
            assert cache.seen_tokens[row] == alone.seen_tokens[0]


@pytest.mark.parametrize("arch", ["qwen3_5", "gemma3"])
def test_pads_between_tokens_are_refused_where_the_model_would_count_them(
    case: Any, helpers: Any, arch: str
) -> None:
    """Recurrent states and sliding windows of the base model can't skip a pad in mid-row."""
    made = case(arch, "ced")
    with made.attach() as attachment:
        cache = attachment.new_cache()
        ids, mask = helpers.padded([helpers.tokens(5), helpers.tokens(9)])
        made.run(ids, cache, mask)
        ids, added = helpers.padded([helpers.tokens(3), helpers.tokens(2)])
        with pytest.raises(AttachError, match="equally many new tokens"):
            made.run(ids, cache, torch.cat([mask, added], dim=1))


@pytest.mark.parametrize("reading", ["shared", "absorbed"])
@pytest.mark.parametrize("method", ["csa2-joint", "csa2+pool-head", "latent+pool+k8v4", "mixed"])
def test_left_padded_rows_equal_single_rows_when_reading_codes(
    case: Any, helpers: Any, arch: str, method: str, reading: str
) -> None:
    """The same for stored codes."""
    made = case(arch, method, resident=reading)
    prompts = [helpers.tokens(n, seed=n) for n in (2, 25)]
    with made.attach() as attachment:
        ids, mask = helpers.padded(prompts)
        cache = attachment.new_cache()
        together = made.run(ids, cache, mask)
        step = made.run(
            torch.full((2, 1), 5), cache, torch.cat([mask, torch.ones(2, 1).long()], dim=1)
        )
        for row, prompt in enumerate(prompts):
            alone = attachment.new_cache()
            single = made.run(prompt, alone)
            helpers.assert_same(together[row, mask[row].bool()], single[0])
            again = made.run(torch.full((1, 1), 5), alone)
            helpers.assert_same(step[row], again[0])


@pytest.mark.parametrize("prefill", ["folded", "exact"])
def test_a_later_token_never_changes_an_earlier_logit(
    case: Any, helpers: Any, arch: str, method: str, prefill: str
) -> None:
    """Causality, with the change inside the window, at its border and in the history."""
    made = case(arch, method, prefill_attention=prefill, resident="auto")
    ids = helpers.tokens(36)
    with made.attach() as attachment:
        before = made.run(ids, attachment.new_cache())
        for position in (1, 5, 13, 29, 35):
            changed = ids.clone()
            changed[0, position] = (changed[0, position] + 11) % 90 + 3
            after = made.run(changed, attachment.new_cache())
            helpers.assert_same(after[:, :position], before[:, :position])
            assert not torch.allclose(after[:, position], before[:, position], atol=1e-3)


def test_twenty_prompts_on_one_attachment_equal_twenty_fresh_ones(
    case: Any, helpers: Any, method: str
) -> None:
    """Nothing is left behind by an earlier prompt (six of them for a composition)."""
    made = case("qwen3_5", method)
    count = 20 if method in helpers.methods else 6
    prompts = [helpers.tokens(10 + n, seed=n) for n in range(count)]
    with made.attach() as attachment:
        in_a_row = [made.run(prompt, attachment.new_cache()) for prompt in prompts]
    for prompt, logits in zip(prompts, in_a_row, strict=True):
        with made.attach() as fresh:
            assert torch.equal(made.run(prompt, fresh.new_cache()), logits)


def test_a_second_turn_equals_one_long_prompt(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """A conversation that goes on with its cache loses nothing."""
    made = case(arch, method, resident="auto")
    ids = helpers.tokens(50)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        turns = [made.run(part, cache) for part in (ids[:, :21], ids[:, 21:22], ids[:, 22:])]
        at_once = attachment.new_cache()
        whole = made.run(ids, at_once)
    flipped = helpers.assert_same_state(helpers.state(cache), helpers.state(at_once))
    helpers.assert_same(torch.cat(turns, dim=1), whole, helpers.tolerance(flipped))


ROW_METHODS = ["latent", "pool-head-overlap", "pool+k8v4", "latent+pool+k8v4", "mixed"]


@pytest.mark.parametrize("method", ROW_METHODS)
def test_rows_can_be_reordered_repeated_and_selected(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """What beams do to a cache keeps each row's own state, unfinished groups and all."""
    made = case(arch, method, resident="auto")
    prompts = helpers.tokens(30, rows=2)
    step = torch.full((2, 1), 9)
    more = torch.cat([step, helpers.tokens(9, rows=2, seed=3)], dim=1).split(1, dim=1)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        made.run(prompts, cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = made.run(step, cache)
        plain = attachment.new_cache()
        made.run(prompts, plain)
        straight = made.run(step, plain)
        plain.batch_repeat_interleave(2)
        assert plain.seen_tokens == [31] * 4
        plain.batch_select_indices(torch.tensor([0, 2]))
        selected = torch.cat([made.run(column, plain) for column in more], dim=1)
        cache.reorder_cache(torch.tensor([1, 0]))
        back = torch.cat([made.run(column, cache) for column in more], dim=1)
    torch.testing.assert_close(swapped.flip(0), straight, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(selected, back, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("method", ROW_METHODS)
def test_rows_of_different_lengths_change_places(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """Rows whose groups begin in different columns; one is doubled, one is lost."""
    made = case(arch, method, resident="auto")
    prompts = [helpers.tokens(n, seed=n) for n in (7, 21, 30)]
    steps = helpers.tokens(9, rows=3, seed=1)
    chosen = [2, 0, 2]
    with made.attach() as attachment:
        ids, mask = helpers.padded(prompts)
        cache = attachment.new_cache()
        made.run(ids, cache, mask)
        cache.reorder_cache(torch.tensor(chosen))
        assert cache.seen_tokens == [30, 7, 30]
        mask = mask[chosen]
        together = []
        for column in steps.split(1, dim=1):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
            together.append(made.run(column, cache, mask))
        for row, prompt in enumerate(chosen):
            alone = attachment.new_cache()
            made.run(prompts[prompt], alone)
            single = [made.run(column, alone) for column in steps[row : row + 1].split(1, dim=1)]
            flipped = helpers.assert_same_state(helpers.state(cache, row), helpers.state(alone))
            ours, theirs = torch.cat(together, dim=1)[row], torch.cat(single, dim=1)[0]
            helpers.assert_same(ours, theirs, helpers.tolerance(flipped))
