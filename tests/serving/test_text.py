"""Text is sent in whole characters, and nothing of a stop text is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.serving.text import Detokeniser, StopFilter

SAID = "Grüße, 世界! 👩‍🚀 ok"


def test_a_character_split_over_tokens_is_held_back_until_it_is_whole(byte_tokenizer: Any) -> None:
    detokeniser = Detokeniser(byte_tokenizer)
    tokens = byte_tokenizer(SAID)["input_ids"]
    pieces = [detokeniser.push(token) for token in tokens]
    assert len(tokens) == len(SAID.encode())
    assert [piece for piece in pieces if piece] == list(SAID)
    assert detokeniser.flush() == ""


def test_half_a_character_at_the_end_is_told_as_such(byte_tokenizer: Any) -> None:
    detokeniser = Detokeniser(byte_tokenizer)
    made = [detokeniser.push(token) for token in byte_tokenizer("a世")["input_ids"][:-1]]
    assert "".join(made) == "a"
    assert detokeniser.flush() == "\ufffd"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(5, 260), max_size=60))
def test_pieces_make_the_text_of_all_tokens(byte_tokenizer: Any, tokens: list[int]) -> None:
    """Any bytes, most of them no valid text."""
    detokeniser = Detokeniser(byte_tokenizer)
    pieces = [detokeniser.push(token) for token in tokens] + [detokeniser.flush()]
    assert "".join(pieces) == byte_tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_space_that_a_tokenizer_drops_at_the_beginning_is_kept_within() -> None:
    """As SentencePiece's way of decoding does, and bytes that it decodes only together."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"▁one": 0, "▁two": 1, "<0xE4>": 2, "<0xB8>": 3, "<0x96>": 4, "<unk>": 5}
    inner = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    detokeniser = Detokeniser(PreTrainedTokenizerFast(tokenizer_object=inner))
    pieces = [detokeniser.push(token) for token in (0, 1, 2, 3, 4, 2, 3, 4, 1)]
    assert pieces == ["one", " two", "", "", "世", "", "", "世", " two"]


def test_a_stop_text_across_pieces_ends_the_text_before_it() -> None:
    stops = StopFilter(["STOP", "\n\n"])
    assert [stops.push(piece) for piece in ("ab S", "T", "O", "x ST", "OP", "never")][:5] == [
        "ab ",
        "",
        "",
        "STOx ",
        "",
    ]
    assert stops.stopped


def test_the_earliest_stop_text_wins() -> None:
    stops = StopFilter(["later", "soon"])
    assert stops.push("so it is soon, later") == "so it is "


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), min_size=30, max_size=30),
)
def test_pieces_do_not_change_where_a_text_stops(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """Up to the first stop text that is complete; that is not always the one that begins first."""
    filtered, made, rest = StopFilter(stops), "", text
    for cut in cuts:
        if rest and not filtered.stopped:
            made += filtered.push(rest[:cut])
            rest = rest[cut:]
    made += "" if filtered.stopped else filtered.flush()
    assert text.startswith(made)
    assert filtered.stopped == any(stop in text for stop in stops)
    assert not any(stop in made for stop in stops)
    assert filtered.stopped or made == text


@pytest.mark.parametrize("stop", ["a", "aa"])
def test_nothing_is_held_back_that_can_be_no_stop(stop: str) -> None:
    assert StopFilter([stop]).push("bcd") == "bcd"
