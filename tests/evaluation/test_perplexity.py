"""Perplexity is what a plain loop over tokens says."""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.evaluation.chunks import LogitChunk, logit_chunks
from kvfold.evaluation.perplexity import CONVENTION, Perplexity
from kvfold.runtime.logits import plain_hidden_states


def measure(model, windows):
    perplexity = Perplexity()
    for chunk in logit_chunks(model, windows, plain_hidden_states(model, windows), rows=50):
        perplexity.update(chunk)
    return perplexity.result()


def test_perplexity_equals_a_naive_loop(tiny_model, windows):
    model = tiny_model("qwen2", dtype=torch.float64)
    losses = []
    for window in windows:
        with torch.no_grad():
            log_probs = model(window[None]).logits[0].log_softmax(-1)
        losses += [-log_probs[t - 1, window[t]].item() for t in range(1, len(window))]
    result = measure(model, windows)
    assert result["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    assert result["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-12)


def test_first_token_of_a_window_is_not_scored(tiny_model, windows):
    model = tiny_model("llama")
    perplexity = Perplexity()
    for chunk in logit_chunks(model, windows, plain_hidden_states(model, windows)):
        perplexity.update(chunk)
    assert perplexity.tokens == windows.shape[0] * (windows.shape[1] - 1)


def test_a_certain_model_has_perplexity_one():
    log_probs = torch.full((3, 5), -math.inf)
    log_probs[:, 2] = 0.0
    perplexity = Perplexity()
    perplexity.update(LogitChunk(log_probs, log_probs, torch.full((3,), 2)))
    assert perplexity.result() == {"loss": 0.0, "perplexity": 1.0}


def test_an_impossible_token_gives_infinity_and_no_overflow_error():
    log_probs = torch.full((1, 2), -1e6)
    perplexity = Perplexity()
    perplexity.update(LogitChunk(log_probs, log_probs, torch.zeros(1, dtype=torch.int64)))
    assert perplexity.result()["perplexity"] == math.inf


def test_the_convention_names_windows_and_their_length():
    text = CONVENTION.format(windows=8, window=512)
    assert "8 non-overlapping windows of 512 tokens" in text
    assert "first token of each window is not scored" in text
