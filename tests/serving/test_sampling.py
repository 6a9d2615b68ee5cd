"""A row's tokens depend on its logits, its options and its seed, and on nothing else."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from kvfold.serving.request import Sampling
from kvfold.serving.sampling import Sampler, nucleus, score

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def drawn(sampler: Sampler, count: int = 3000) -> Counter[int]:
    return Counter(sampler.pick(LOGITS) for _ in range(count))


def test_tokens_come_as_often_as_they_should() -> None:
    found = drawn(Sampler(Sampling(seed=1)))
    for token, probability in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert math.isclose(found[token] / 3000, probability, abs_tol=0.03)


def test_temperature_sharpens() -> None:
    found = drawn(Sampler(Sampling(temperature=0.5, seed=1)))
    assert math.isclose(found[0] / 3000, 0.25 / 0.365, abs_tol=0.03)


@pytest.mark.parametrize("temperature", [0, 1e-30])
def test_no_temperature_takes_the_likeliest(temperature: float) -> None:
    assert drawn(Sampler(Sampling(temperature=temperature)), 50) == {0: 50}


def test_top_p_keeps_the_fewest_that_have_it() -> None:
    assert set(drawn(Sampler(Sampling(top_p=0.79, seed=1)))) == {0, 1}
    assert set(drawn(Sampler(Sampling(top_p=0.81, seed=1)))) == {0, 1, 2}
    assert nucleus(LOGITS.exp(), 1e-9).count_nonzero() == 1


def test_a_seed_gives_the_same_again_and_a_choice_has_its_own() -> None:
    first, again = (
        [Sampler(Sampling(seed=5), index).pick(LOGITS) for index in range(40)] for _ in range(2)
    )
    shifted = [Sampler(Sampling(seed=6), index).pick(LOGITS) for index in range(39)]
    assert first == again
    assert first[1:] == shifted
    assert len(set(first)) > 1


def test_without_a_seed_two_rows_differ() -> None:
    assert (
        Sampler(Sampling()).generator.initial_seed() != Sampler(Sampling()).generator.initial_seed()
    )


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_every_seed_that_may_be_asked_for_works(seed: int) -> None:
    assert Sampler(Sampling(seed=seed), 5).pick(LOGITS) in range(4)


def test_penalties_and_biases_act_on_greedy_choices_too() -> None:
    biased = Sampler(Sampling(temperature=0, logit_bias={3: 100.0}))
    assert not biased.is_greedy
    assert biased.pick(LOGITS) == 3
    tired = Sampler(Sampling(temperature=0, presence_penalty=0.2, frequency_penalty=0.2))
    assert tired.pick(LOGITS) == 0
    tired.note(0)
    assert tired.pick(LOGITS) == 0
    tired.note(0)
    assert tired.pick(LOGITS) == 1


def test_scores_are_of_the_model_itself() -> None:
    logprob, top = score(LOGITS + 7, 2, 2)
    assert math.isclose(logprob, math.log(0.15), abs_tol=1e-5)
    assert [token for token, _ in top] == [0, 1]
    assert score(LOGITS, 0, 0)[1] == ()
