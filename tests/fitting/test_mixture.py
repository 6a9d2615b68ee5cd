"""Mixtures: pure in seed and step, true to their weights, every window once a round."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold
from kvfold.errors import CorpusError
from kvfold.fitting.mixture import (
    BLOCK,
    LONGEST_ROUND,
    Mixture,
    MixturePart,
    apportion,
    turns,
    whole_weights,
)

NICE = st.sampled_from([0.1, 0.25, 0.5, 1, 2, 3, 7, 0.05, 1.5])
ODD = st.floats(1e-3, 1e3)


def part(number, windows, weight, seq=3):
    """A part of which every window names part and window."""
    ids = torch.tensor([[number, window, 7] for window in range(windows)])
    return MixturePart(f"part {number}", ids[:, :seq].contiguous(), weight)


@st.composite
def mixtures(draw, weights=NICE, most=5):
    chosen = draw(st.lists(weights, min_size=1, max_size=most))
    sizes = draw(st.lists(st.integers(1, 23), min_size=len(chosen), max_size=len(chosen)))
    parts = [part(n, *pair) for n, pair in enumerate(zip(sizes, chosen, strict=True))]
    return Mixture(parts, draw(st.integers(0, 2**40)))


def rows_of(mixture, count):
    """(part, window) of the first rows."""
    return [tuple(row[:2]) for row in mixture.batch(0, count).tolist()]


@given(mixtures(), st.integers(0, 10**7), st.integers(1, 70))
@settings(deadline=None, max_examples=40)
def test_a_step_is_the_same_whoever_asks_and_whatever_was_asked_before(mixture, step, rows):
    again = Mixture(mixture.parts, mixture.seed)
    again.batch(3, 5)
    expected = mixture.batch(step, rows)
    assert expected.shape == (rows, mixture.seq)
    assert expected.dtype == torch.int64
    assert torch.equal(again.batch(step, rows), expected)
    assert torch.equal(mixture.batch(step, rows), expected)


@given(mixtures(), st.integers(0, 50), st.integers(1, 20), st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_steps_of_accumulated_rows_are_the_rows_of_one_step(mixture, step, rows, accumulated):
    one = mixture.batch(step, rows * accumulated)
    several = [mixture.batch(step * accumulated + n, rows) for n in range(accumulated)]
    assert torch.equal(one, torch.cat(several))


@given(mixtures(weights=NICE | ODD), st.integers(1, 60))
@settings(deadline=None, max_examples=20)
def test_after_every_block_each_part_is_within_a_row_of_its_share(mixture, blocks):
    total = sum(Fraction(str(float(p.weight))) for p in mixture.parts)
    drawn = Counter()
    for block in range(blocks):
        drawn.update(row[0] for row in mixture.batch(block, BLOCK).tolist())
        rows = (block + 1) * BLOCK
        rounding = Fraction(rows * len(mixture.parts), LONGEST_ROUND)
        for number, p in enumerate(mixture.parts):
            exact = rows * Fraction(str(float(p.weight))) / total
            assert abs(drawn[number] - exact) < 1 + rounding


@given(mixtures(weights=NICE | ODD), st.integers(0, 40), st.integers(1, 50))
@settings(deadline=None, max_examples=15)
def test_shares_are_what_was_given(mixture, steps, rows):
    counted = Counter(number for number, _ in rows_of(mixture, steps * rows)) if steps else {}
    expected = {p.name: counted.get(n, 0) for n, p in enumerate(mixture.parts)}
    assert mixture.shares(steps, rows) == expected


def test_shares_far_on_need_no_run_up_to_them():
    mixture = Mixture([part(0, 5, 0.7), part(1, 5, 0.2), part(2, 5, 0.1)], 0)
    assert mixture.shares(10**12, 10) == {
        "part 0": 7 * 10**12,
        "part 1": 2 * 10**12,
        "part 2": 10**12,
    }
    assert mixture.batch(10**12, 10).shape == (10, 3)


@given(mixtures())
@settings(deadline=None, max_examples=40)
def test_every_window_comes_once_before_any_comes_again(mixture):
    by_part = {}
    for number, window in rows_of(mixture, 400):
        by_part.setdefault(number, []).append(window)
    assert by_part
    for number, windows in by_part.items():
        size = len(mixture.parts[number].windows)
        for start in range(0, len(windows), size):
            epoch = windows[start : start + size]
            assert len(set(epoch)) == len(epoch)
            if len(epoch) == size:
                assert sorted(epoch) == list(range(size))


def test_epochs_and_parts_and_seeds_have_orders_of_their_own():
    def orders(seed):
        drawn = rows_of(Mixture([part(0, 30, 1), part(1, 30, 1)], seed), 120)
        windows = [[w for p, w in drawn if p == number] for number in (0, 1)]
        return [tuple(w[start : start + 30]) for w in windows for start in (0, 30)]

    assert len({*orders(0), *orders(1)}) == 8


def test_a_part_keeps_its_order_when_others_come_and_go():
    alone = rows_of(Mixture([part(0, 30, 1)], 5), 30)
    beside = [row for row in rows_of(Mixture([part(1, 9, 2), part(0, 30, 1)], 5), 90) if not row[0]]
    assert beside == alone


def test_turns_are_drawn_so_that_no_part_goes_round_with_the_steps():
    mixture = Mixture([part(0, 50, 1), part(1, 50, 1)], 0)
    numbers = [number for number, _ in rows_of(mixture, 3200)]
    even = numbers[::2].count(0) / 1600
    assert 0.45 < even < 0.55
    for start in range(0, 3200, BLOCK):
        assert numbers[start : start + BLOCK].count(0) == BLOCK // 2


def test_another_process_sees_the_same_rows():
    code = (
        "import torch; from kvfold.fitting.mixture import Mixture;"
        "m = Mixture([('a', torch.arange(60).view(20, 3), .7), ('b', torch.arange(30).view(10, 3),"
        " .3)], 11); print(m.batch(123, 9).tolist(), m.digest())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(kvfold.__file__).parents[1])}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    parts = [
        MixturePart("a", torch.arange(60).view(20, 3), 0.7),
        MixturePart("b", torch.arange(30).view(10, 3), 0.3),
    ]
    mixture = Mixture(parts, 11)
    assert found.stdout.strip() == f"{mixture.batch(123, 9).tolist()} {mixture.digest()}"


def test_the_digest_tells_all_that_decides_the_rows():
    def made(seed=0, weight=1.0, name="part 0", last=7):
        ids = part(0, 4, 1).windows.clone()
        ids[-1, -1] = last
        return Mixture([MixturePart(name, ids, weight), part(1, 4, 1)], seed).digest()

    assert made() == made()
    assert len({made(), made(seed=1), made(weight=2.0), made(name="x"), made(last=8)}) == 5


@settings(deadline=None)
@given(st.lists(NICE | ODD, min_size=1, max_size=8), st.integers(8, 5000))
def test_whole_shares_add_up_and_are_within_one(weights, total):
    exact = [Fraction(str(float(weight))) for weight in weights]
    shares = apportion(exact, total)
    assert sum(shares) == total
    assert min(shares) >= 1
    if all(weight * total / sum(exact) >= 1 for weight in exact):
        assert all(
            abs(share - weight * total / sum(exact)) < 1
            for share, weight in zip(shares, exact, strict=True)
        )


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_no_turn_is_ever_a_whole_turn_from_its_share(shares):
    order, total = turns(shares), sum(shares)
    given_so_far = [0] * len(shares)
    for number, chosen in enumerate(order, start=1):
        given_so_far[chosen] += 1
        for count, share in zip(given_so_far, shares, strict=True):
            assert abs(count * total - number * share) < total
    assert given_so_far == shares


def test_weights_that_people_write_are_kept_exactly_and_others_nearly():
    assert whole_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_weights([2, 2]) == [1, 1]
    assert whole_weights([5]) == [1]
    rounded = whole_weights([1 / 3, 2 / 3, 1e-12])
    assert sum(rounded) == LONGEST_ROUND
    assert rounded[2] == 1
    assert rounded[0] / rounded[1] == pytest.approx(0.5, abs=1e-4)


def test_one_part_gives_everything():
    mixture = Mixture([part(0, 5, 1e-3)], 0)
    assert sorted(window for _, window in rows_of(mixture, 5)) == list(range(5))
    assert mixture.shares(3, 5) == {"part 0": 15}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "at least one part"),
        ([part(0, 3, 1), part(0, 3, 1)], "different names"),
        ([part(0, 3, 0)], "part 0 has 0"),
        ([part(0, 3, -1.0)], "above 0"),
        ([part(0, 3, float("nan"))], "finite"),
        ([part(0, 3, float("inf"))], "finite"),
        ([part(0, 3, 1), part(1, 3, 1, seq=2)], "equally long; got .*'part 1': 2"),
        ([MixturePart("a", torch.empty(0, 3, dtype=torch.int64), 1)], r"\(0, 3\)"),
        ([MixturePart("a", torch.zeros(3, dtype=torch.int64), 1)], r"\(3,\)"),
        ([MixturePart("a", torch.zeros(3, 2), 1)], "float32"),
    ],
)
def test_parts_that_make_no_mixture_are_refused(parts, reason):
    with pytest.raises(CorpusError, match=reason):
        Mixture(parts, 0)


def test_steps_and_rows_must_be_there():
    mixture = Mixture([part(0, 3, 1)], 0)
    for step, rows in ((-1, 2), (0, 0)):
        with pytest.raises(CorpusError, match=f"step {step} with {rows} rows"):
            mixture.batch(step, rows)
    with pytest.raises(CorpusError, match="3 parts"):
        apportion([Fraction(1)] * 3, 2)
