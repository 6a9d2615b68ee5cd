"""Attention over exact rows and slots against the plain reference."""

from __future__ import annotations

import pytest
import torch

from kvfold.runtime.reference import reference_attention
from kvfold.runtime.schedule import Schedule
from kvfold.vllm import attend as module
from kvfold.vllm.attend import ExactRows, KeysValues, Slots, attend, exact_positions

HEADS, KV_HEADS, WIDTH, SCALING = 6, 2, 8, 0.3


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("block", [7, 1024])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("anchors", "window", "group", "before", "after"),
    [(4, 16, 1, 0, 60), (4, 16, 4, 37, 60), (0, 8, 3, 59, 60), (4, 0, 1, 20, 41), (4, 16, 4, 0, 9)],
)
def test_equals_the_reference(monkeypatch, anchors, window, group, before, after, biased, block):
    monkeypatch.setattr(module, "BLOCK", block)
    schedule = Schedule(anchors, window, group)
    keys, values = random(2, 1, KV_HEADS, after, WIDTH)
    made = schedule.made(after)
    slot_keys, slot_values = random(2, 1, KV_HEADS, made, WIDTH) + 1
    queries = random(1, HEADS, after - before, WIDTH)
    bias = random(HEADS) if biased else None
    expected = reference_attention(
        queries,
        keys,
        values,
        slot_keys,
        slot_values,
        anchors=anchors,
        window=window,
        group=group,
        scaling=SCALING,
        slot_bias=bias,
    )
    held = exact_positions(schedule, before, after)

    def read(numbers):
        part = slice(numbers.start, numbers.stop)
        return KeysValues(slot_keys[0][:, part], slot_values[0][:, part])

    output = attend(
        queries[0].transpose(0, 1),
        torch.arange(before, after),
        ExactRows(keys[0][:, held], values[0][:, held], held),
        SCALING,
        schedule,
        Slots(schedule.slots(after), read, bias),
    )
    assert torch.allclose(output, expected[0].transpose(0, 1), atol=1e-12)


@pytest.mark.parametrize("block", [7, 1024])
@pytest.mark.parametrize("before", [0, 59])
def test_values_may_be_absorbed(monkeypatch, before, block):
    """Codes are summed in place of values; both give the same."""
    monkeypatch.setattr(module, "BLOCK", block)
    after, code_width = 60, 11
    schedule = Schedule(anchors=4, window=16, group=2)
    keys, values = random(2, KV_HEADS, after, WIDTH)
    slot_keys = random(KV_HEADS, schedule.made(after), WIDTH)
    codes, maps = random(1, schedule.made(after), code_width), random(KV_HEADS, code_width, WIDTH)
    held = exact_positions(schedule, before, after)

    def output(of, absorbed=None):
        def read(numbers):
            part = slice(numbers.start, numbers.stop)
            return KeysValues(slot_keys[:, part], of[:, part])

        return attend(
            random(after - before, HEADS, WIDTH),
            torch.arange(before, after),
            ExactRows(keys[:, held], values[:, held], held),
            SCALING,
            schedule,
            Slots(schedule.slots(after), read, None, absorbed),
        )

    rebuilt, summed = output(codes @ maps), output(codes, lambda sums: sums @ maps)
    assert torch.allclose(summed, rebuilt, atol=1e-12)


def test_slots_alone_may_be_all_there_is():
    """Without anchors and window a token sees no exact row, its own included."""
    schedule = Schedule(anchors=0, window=0)
    codes, maps = random(1, 20, 11), random(KV_HEADS, 11, WIDTH)
    slot_keys, nothing = random(KV_HEADS, 20, WIDTH), random(KV_HEADS, 0, WIDTH)
    held = exact_positions(schedule, 19, 20)
    assert len(held) == 0

    def output(of, absorbed=None):
        return attend(
            random(1, HEADS, WIDTH),
            torch.tensor([19]),
            ExactRows(nothing, nothing, held),
            SCALING,
            schedule,
            Slots(20, lambda _: KeysValues(slot_keys, of), None, absorbed),
        )

    summed = output(codes, lambda sums: sums @ maps)
    assert torch.allclose(summed, output(codes @ maps), atol=1e-12)


def test_without_a_schedule_it_is_causal_attention():
    keys, values = random(2, KV_HEADS, 20, WIDTH)
    queries = random(5, HEADS, WIDTH)
    held = exact_positions(None, 15, 20)
    output = attend(queries, torch.arange(15, 20), ExactRows(keys, values, held), SCALING)
    mask = torch.arange(20)[None] <= torch.arange(15, 20)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=SCALING,
        enable_gqa=True,
    )
    assert torch.allclose(output, expected[0].transpose(0, 1), atol=1e-12)


def test_only_rows_that_are_seen_are_read():
    schedule = Schedule(anchors=4, window=16, group=4)
    held = exact_positions(schedule, 100, 101)
    assert held.tolist() == [0, 1, 2, 3, *range(schedule.folded_until(101), 101)]
    assert len(held) <= 4 + schedule.ring_size


@pytest.mark.parametrize("after", range(1, 8))
def test_prompts_shorter_than_the_anchors_see_all_that_there_is(after):
    """Such a prompt once ended a server."""
    assert exact_positions(Schedule(anchors=4, window=2), 0, after).tolist() == list(range(after))
