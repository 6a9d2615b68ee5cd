"""The plain peer is the plain model: another process in between changes nothing.

The worker runs in this environment here, where `plain` needs nothing but transformers.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from kvfold.errors import PeerError
from kvfold.evaluation.continuation import continuation_loss
from kvfold.evaluation.greedy import read, says, speak
from kvfold.evaluation.peers.model import HIDDEN

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""float32 sums in another order: a prompt is read in two parts there."""


def test_the_last_logits_are_the_models_own(plain_peer, tiny, ids):
    ours, _ = read(tiny, ids)
    theirs, cache = read(plain_peer, ids)
    torch.testing.assert_close(theirs, ours, **CLOSE)
    shape = tiny.config
    each = 2 * shape.num_key_value_heads * shape.head_dim * 4 * shape.num_hidden_layers
    assert cache.nbytes() == cache.kept_bytes() == [60 * each] * 2


@pytest.mark.parametrize("question", [1, 7, 60, 200])
def test_where_the_question_begins_changes_nothing_uncompressed(plain_peer, tiny, ids, question):
    ours, _ = read(tiny, ids)
    theirs, _ = read(plain_peer.asking([question, 3]), ids)
    torch.testing.assert_close(theirs, ours, **CLOSE)


def test_what_is_said_is_the_same(plain_peer, tiny, ids, byte_tokenizer):
    prompts = ids.tolist()
    assert says(plain_peer, prompts, byte_tokenizer, 6) == says(tiny, prompts, byte_tokenizer, 6)


def test_losses_of_continuations_are_the_same(plain_peer, tiny, ids):
    ours = continuation_loss(tiny, ids, 40, chunk=8)
    torch.testing.assert_close(continuation_loss(plain_peer, ids, 40, chunk=8), ours, **CLOSE)


def test_a_copied_cache_goes_on_by_itself(plain_peer, ids):
    scores, cache = read(plain_peer, ids)
    second = copy.deepcopy(cache)
    first = speak(plain_peer, scores, cache, 5)
    assert torch.equal(speak(plain_peer, scores, second, 5), first)
    assert cache.numbers != second.numbers


def test_caches_that_nobody_holds_are_given_up(plain_peer, ids):
    _, cache = read(plain_peer, ids)
    numbers = cache.numbers
    del cache
    gc.collect()
    read(plain_peer, ids)
    with pytest.raises(PeerError, match=f"KeyError: {numbers[0]}"):
        plain_peer.worker.ask("bytes", caches=numbers)


def test_last_columns_are_those_of_the_models_own_layers(plain_peer, tiny, ids):
    with plain_peer.last_columns(4) as taken:
        _, cache = read(plain_peer, ids[:, :58])
        plain_peer(input_ids=ids[:, 58:], cache=cache)
    found = tiny(input_ids=ids, output_hidden_states=True)
    assert sorted(taken) == [HIDDEN, *range(tiny.config.num_hidden_layers)]
    assert taken[0].shape == (2, 3, tiny.config.hidden_size)  # the question's token, and two
    torch.testing.assert_close(taken[HIDDEN], found.hidden_states[-1][:, -3:], **CLOSE)


def test_an_error_in_the_worker_leaves_it_alive(plain_peer, tiny, ids):
    with pytest.raises(PeerError, match="KeyError"):
        plain_peer.worker.ask("sing")
    torch.testing.assert_close(read(plain_peer, ids)[0], read(tiny, ids)[0], **CLOSE)
