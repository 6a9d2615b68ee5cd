"""Peers by name, and what is said of a name that is none."""

from __future__ import annotations

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.peers.spec import PeerSpec, check_likes, parse_peers


def test_names_are_peers():
    text = "snapkv@4x, kvzip@2.5x,streaming-llm=my-addon,quantized-4bit,plain,plain-bf16"
    assert parse_peers(text) == (
        PeerSpec("snapkv@4x", "snapkv", times_smaller=4.0),
        PeerSpec("kvzip@2.5x", "kvzip", times_smaller=2.5),
        PeerSpec("streaming-llm=my-addon", "streaming-llm", like="my-addon"),
        PeerSpec("quantized-4bit", "quantized", bits=4),
        PeerSpec("plain", "plain"),
        PeerSpec("plain-bf16", "plain", dtype="bfloat16"),
    )


@pytest.mark.parametrize(
    "name",
    ["snapkv", "snapkv@", "snapkv@4", "snapkv=", "h2o@4x", "quantized-8bit", "plain@4x", "kvzip@x"],
)
def test_a_name_that_is_none_is_refused_with_those_there_are(name):
    with pytest.raises(EvaluationError, match=r"snapkv@4x.*expected-attention") as caught:
        parse_peers(f"plain,{name}")
    assert repr(name) in str(caught.value)


def test_a_cache_does_not_get_larger():
    with pytest.raises(EvaluationError, match="at least 1x smaller"):
        parse_peers("snapkv@0.5x")


@pytest.mark.parametrize(("text", "said"), [(" , ", "at least one"), ("plain,plain", "once")])
def test_no_peer_and_one_peer_twice_are_refused(text, said):
    with pytest.raises(EvaluationError, match=said):
        parse_peers(text)


def test_a_peer_is_only_like_a_subject_of_the_run():
    peers = parse_peers("snapkv=8x")
    check_likes(peers, ["4x", "8x"])
    with pytest.raises(EvaluationError, match="this run has 4x"):
        check_likes(peers, ["4x"])
