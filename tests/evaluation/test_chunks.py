"""Chunked log-probabilities are the whole ones, and miss or repeat no position."""

from __future__ import annotations

import pytest
import torch

from kvfold.evaluation.chunks import logit_chunks
from kvfold.runtime.logits import plain_hidden_states


@pytest.mark.parametrize("rows", [1, 7, 128, 10_000])
def test_chunks_of_any_size_join_to_the_whole(tiny_model, windows, rows):
    model = tiny_model("llama", dtype=torch.float64)
    hidden = plain_hidden_states(model, windows)
    with torch.no_grad():
        whole = model(windows).logits[:, :-1].log_softmax(-1).flatten(0, 1)
    chunks = list(logit_chunks(model, windows, hidden, rows=rows))
    torch.testing.assert_close(torch.cat([c.log_probs for c in chunks]), whole)
    assert torch.equal(torch.cat([c.targets for c in chunks]), windows[:, 1:].flatten())


def test_no_chunk_has_more_rows_than_asked_for(tiny_model, windows):
    model = tiny_model("llama")
    hidden = plain_hidden_states(model, windows)
    chunks = list(logit_chunks(model, windows, hidden, hidden, rows=32))
    assert max(len(chunk.log_probs) for chunk in chunks) == 32
    assert sum(len(chunk.log_probs) for chunk in chunks) == 6 * 39


def test_final_soft_cap_of_gemma_is_applied(tiny_model, windows):
    model = tiny_model("gemma3")
    with torch.no_grad():
        whole = model(windows).logits[:, :-1].log_softmax(-1).flatten(0, 1)
    (chunk,) = logit_chunks(model, windows, plain_hidden_states(model, windows), rows=1000)
    torch.testing.assert_close(chunk.log_probs, whole, rtol=1e-4, atol=1e-5)
