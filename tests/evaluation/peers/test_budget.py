"""A peer has as many bytes when the answer begins as its name says."""

from __future__ import annotations

import pytest

from kvfold.anatomy import anatomy
from kvfold.evaluation.memory import memory_at
from kvfold.evaluation.peers.budget import Budget
from kvfold.evaluation.peers.spec import parse_peers
from kvfold.presets import preset


@pytest.fixture
def shape(tiny):
    return anatomy(tiny)


def budget(name, shape, plan=None):
    (spec,) = parse_peers(name)
    return Budget(spec, shape, plan)


@pytest.mark.parametrize("question", [1, 30])
def test_a_prompt_keeps_its_share_with_the_question_in_it(shape, question):
    assert budget("snapkv@4x", shape).kept(400, question) + question == 100


def test_a_question_longer_than_the_share_leaves_one_token_of_the_context(shape):
    assert budget("streaming-llm@8x", shape).kept(80, 40) == 1


@pytest.mark.parametrize(
    ("name", "prompt", "question"),
    [
        ("snapkv@1x", 400, 10),  # nothing is to go
        ("snapkv@4x", 8, 3),  # five tokens are too few to choose among
        ("plain", 400, 1),
        ("quantized-4bit", 400, 1),
    ],
)
def test_a_context_stays_whole_where_nothing_is_dropped(shape, name, prompt, question):
    assert budget(name, shape).kept(prompt, question) is None


@pytest.mark.parametrize("prompt", [300, 700, 2000])
def test_a_peer_like_a_subject_takes_its_bytes_at_every_length(shape, prompt):
    plan = preset("k8v4", shape)
    kept = budget("kvzip=mine", shape, plan).kept(prompt, 20) + 20
    (memory,) = memory_at(plan, shape, (prompt,))
    a_token = memory.plain_bytes / prompt
    assert 0 <= memory.stored_bytes - kept * a_token < a_token


def test_a_peer_like_a_subject_that_folds_nothing_yet_keeps_all(shape):
    assert budget("kvzip=mine", shape, preset("k8v4", shape)).kept(100, 5) is None
