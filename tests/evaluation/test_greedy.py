"""Greedy decoding by hand is transformers' own, and a copied cache goes on as the first one."""

from __future__ import annotations

import copy

import pytest
import torch

from kvfold.evaluation.greedy import before_end, begins_with, end_tokens, read, speak

SAME = 1e-3
"""Of logits near 5: linear attention runs in float32 whatever the model's dtype."""


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_it_says_what_generate_says(tiny_model, windows, name):
    model = tiny_model(name, dtype=torch.float64)
    made = speak(model, *read(model, windows), 8)
    expected = model.generate(
        input_ids=windows,
        attention_mask=torch.ones_like(windows),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=[-1],
    )
    assert torch.equal(made, expected[:, windows.shape[1] :])


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_copy_of_the_cache_leaves_the_first_as_it_was(tiny_model, windows, name):
    model = tiny_model(name, dtype=torch.float64)
    scores, cache = read(model, windows[:, :30])
    first = speak(model, scores, copy.deepcopy(cache), 6)
    assert torch.equal(speak(model, scores, copy.deepcopy(cache), 6), first)
    whole, _ = read(model, windows)
    on, _ = read(model, windows[:, 30:], cache)
    torch.testing.assert_close(on, whole, rtol=0, atol=SAME)


def test_it_stops_once_every_row_has_ended(tiny_model, windows):
    model = tiny_model("llama", dtype=torch.float64)
    scores, cache = read(model, windows[:2])
    made = speak(model, scores, copy.deepcopy(cache), 6)
    ends = set(made[:, 2].tolist())
    first = [next(n for n, token in enumerate(row) if token in ends) for row in made.tolist()]
    stopped = speak(model, scores, cache, 6, ends)
    assert torch.equal(stopped, made[:, : max(first) + 1])
    assert stopped.shape[1] < 6


def test_a_text_is_cut_before_its_end():
    assert before_end([4, 5, 2, 6, 2], {2}) == [4, 5]
    assert before_end([4, 5], {2}) == [4, 5]


def test_end_tokens_are_the_models_own(tiny_model):
    model = tiny_model("llama")
    for given, found in ((2, {2}), ([2, 5], {2, 5}), (None, set())):
        model.generation_config.eos_token_id = given
        assert end_tokens(model) == found


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 48213.\nThe", True),
        ("48213", True),
        ("\n 48213, or", True),
        (" 482130", False),
        (" 4821", False),
        (" is 48213", False),
        ("", False),
    ],
)
def test_an_answer_must_come_first_and_whole(text, right):
    assert begins_with(text, "48213") is right
