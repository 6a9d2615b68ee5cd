"""Rows of a batch never notice each other, their padding, or what was run before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvfold.errors import AttachError


def _padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - row.shape[1] :] = row[0]
        mask[index, longest - row.shape[1] :] = 1
    return ids, mask


@pytest.mark.parametrize("prefill", ["folded", "exact"])
def test_left_padded_rows_equal_single_rows(
    case: Any, helpers: Any, arch: str, method: str, prefill: str
) -> None:
    """Prompt, decode steps and a second padded turn of a batch equal each row run alone."""
    made = case(arch, method, prefill_attention=prefill, resident="auto")
    prompts = [helpers.tokens(n, seed=n) for n in (3, 19, 30)]
    steps = helpers.tokens(4, rows=3, seed=1)
    only_full = len(made.anatomy.foldable_layers) == made.anatomy.num_layers
    lengths = (6, 2, 9) if only_full else (7, 7, 7)
    turns = [helpers.tokens(n, seed=50 + n) for n in lengths]
    with made.attach() as attachment:
        cache = attachment.new_cache()
        ids, mask = _padded(prompts)
        collected = [made.run(ids, cache, mask)]
        for column in range(4):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
            collected.append(made.run(steps[:, column : column + 1], cache, mask))
        ids, added = _padded(turns)
        mask = torch.cat([mask, added], dim=1)
        collected.append(made.run(ids, cache, mask))
        together = torch.cat(collected, dim=1)
        for row, prompt in enumerate(prompts):
            alone = attachment.new_cache()
            single = [made.run(prompt, alone)]
            single += [made.run(steps[row : row + 1, c : c + 1], alone) for c in range(4)]
            single.append(made.run(turns[row], alone))
            real = together[row, mask[row].bool()]
            helpers.assert_same(real, torch.cat(single, dim=1)[0])
            assert cache.seen_tokens[row] == alone.seen_tokens[0]


@pytest.mark.parametrize("arch", ["qwen3_5", "gemma3"])
def test_pads_between_tokens_are_refused_where_the_model_would_count_them(
    case: Any, helpers: Any, arch: str
) -> None:
    """Recurrent states and sliding windows of the base model can't skip a pad in mid-row."""
    made = case(arch, "ced")
    with made.attach() as attachment:
        cache = attachment.new_cache()
        ids, mask = _padded([helpers.tokens(5), helpers.tokens(9)])
        made.run(ids, cache, mask)
        ids, added = _padded([helpers.tokens(3), helpers.tokens(2)])
        with pytest.raises(AttachError, match="equally many new tokens"):
            made.run(ids, cache, torch.cat([mask, added], dim=1))


@pytest.mark.parametrize("reading", ["shared", "absorbed"])
def test_left_padded_rows_equal_single_rows_when_reading_codes(
    case: Any, helpers: Any, arch: str, reading: str
) -> None:
    """The same for stored codes."""
    made = case(arch, "csa2-joint", resident=reading)
    prompts = [helpers.tokens(n, seed=n) for n in (2, 25)]
    with made.attach() as attachment:
        ids, mask = _padded(prompts)
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
    """Nothing is left behind by an earlier prompt."""
    made = case("qwen3_5", method)
    prompts = [helpers.tokens(10 + n, seed=n) for n in range(20)]
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
        whole = made.run(ids, attachment.new_cache())
    helpers.assert_same(torch.cat(turns, dim=1), whole)


def test_rows_can_be_reordered_repeated_and_selected(case: Any, helpers: Any, arch: str) -> None:
    """What beams do to a cache keeps each row's own state."""
    made = case(arch, "latent", resident="auto")
    prompts = helpers.tokens(30, rows=2)
    step = torch.full((2, 1), 9)
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
        selected = made.run(step, plain)
        cache.reorder_cache(torch.tensor([1, 0]))
        back = made.run(step, cache)
    torch.testing.assert_close(swapped.flip(0), straight, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(selected, back, atol=1e-9, rtol=1e-9)
