"""Documents in, windows of a stream out; what is held out is nowhere trained on."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import CorpusError
from kvfold.fitting.corpus import load_corpus
from kvfold.fitting.packing import (
    load_documents,
    packed_windows,
    texts_of,
    token_stream,
    without,
)

END = 0


class Characters:
    """A tokenizer of one token a character; "$" is its end-of-text token, if it has one."""

    chat_template = "x"

    def __init__(self, eos_token_id=END):
        self.eos_token_id = eos_token_id
        self.read = 0

    def __call__(self, text, *, add_special_tokens, verbose):
        assert not add_special_tokens
        self.read += len(text)
        return {"input_ids": [END if c == "$" else ord(c) for c in text]}

    def apply_chat_template(self, messages, *, tokenize):
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def written(ids):
    return "".join("|" if i == END else chr(i) for i in ids.tolist())


def records(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


def test_a_document_is_a_file_or_a_record_of_any_kind(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    lines = [
        {"text": "plain"},
        {"question": "1+1?", "answer": "2"},
        {"problem": "p", "solution": "s", "answer": "a"},
        {"prompt": "say", "response": "said"},
        {"prompt": "go", "completion": "on"},
        {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"},
        {"text": " \n"},
    ]
    lines = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "b.jsonl").write_text(lines, encoding="utf-8")
    documents = load_documents(tmp_path, Characters())
    assert documents.train + documents.held_out == (
        "one\n\ntwo\n",
        "plain",
        "1+1?\n2",
        "p\ns",
        "say\nsaid",
        "go\non",
        "<user>hi",
    )


def test_a_row_of_a_hub_data_set_is_a_document(monkeypatch):
    class Rows:
        @staticmethod
        def load_dataset(*args, **kwargs):
            return iter({"problem": f"p{n}", "solution": f"s{n}"} for n in range(20))

    monkeypatch.setitem(sys.modules, "datasets", Rows)
    documents = load_documents("hub:owner/name")
    assert documents.train == tuple(f"p{n}\ns{n}" for n in range(18))
    assert documents.held_out == ("p18\ns18", "p19\ns19")


def test_a_record_that_is_of_no_kind_says_what_is(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"problem and solution.* line 1 has prompt, answer"):
        load_documents(path)


def test_the_default_corpus_has_a_document_a_topic_and_the_text_of_load_corpus():
    documents, text = load_documents(), load_corpus()
    assert "\n\n".join(documents.train) + "\n" == text.train
    assert "\n\n".join(documents.held_out) + "\n" == text.held_out
    assert len(documents.train) > 30 < 5 * len(documents.held_out)
    assert documents.name == text.name


def test_the_last_tenth_is_held_out_in_whole_documents(tmp_path):
    texts = [f"text {n:03}" for n in range(200)]
    documents = load_documents(records(tmp_path / "a.jsonl", texts))
    assert documents.train + documents.held_out == tuple(texts)
    assert len(documents.held_out) == 20


def test_a_document_that_would_be_most_of_the_held_out_part_is_cut_at_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("short\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("".join(f"line {n:03}\n" for n in range(100)), encoding="utf-8")
    documents = load_documents(tmp_path)
    assert documents.train[0] == "short\n"
    assert documents.train[1].endswith("line 089\n")
    assert documents.held_out == ("".join(f"line {n:03}\n" for n in range(90, 100)),)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("ab \n", min_size=1, max_size=30), min_size=1, max_size=30))
def test_parts_share_no_document_however_texts_repeat(tmp_path_factory, texts):
    path = records(tmp_path_factory.mktemp("split") / "a.jsonl", texts)
    try:
        documents = load_documents(path)
    except CorpusError:
        return
    assert documents.train
    assert documents.held_out
    assert not texts_of(documents.train) & texts_of(documents.held_out)
    assert len("".join(documents.train + documents.held_out)) <= len("".join(texts))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 60), min_size=10, max_size=60))
def test_a_split_loses_nothing_and_holds_out_at_most_a_fifth(tmp_path_factory, sizes):
    letters = map(chr, itertools.count(0x4E00))  # all different: no part is a copy of another
    texts = ["".join(itertools.islice(letters, size)) for size in sizes]
    documents = load_documents(records(tmp_path_factory.mktemp("split") / "a.jsonl", texts))
    assert "".join(documents.train + documents.held_out) == "".join(texts)
    held_out = len("".join(documents.held_out))
    assert 0 < held_out <= 0.2 * sum(sizes) + 1


def test_what_is_held_out_is_not_trained_on_in_a_copy(tmp_path):
    texts = [f"text {n:03}" for n in range(100)]
    texts[3] = " text 095\n"
    documents = load_documents(records(tmp_path / "a.jsonl", texts))
    assert "text 095" in documents.held_out
    assert documents.train == tuple(texts[:3] + texts[4 : 100 - len(documents.held_out)])
    with pytest.raises(CorpusError, match="9 documents are to train on, 9 of which"):
        load_documents(records(tmp_path / "b.jsonl", ["same"] * 10))


def test_texts_of_another_part_can_be_left_out_too(tmp_path):
    documents = load_documents(records(tmp_path / "a.jsonl", [f"text {n}" for n in range(10)]))
    assert len(without(documents, {"text 1", "text 9"}).train) == 8
    with pytest.raises(CorpusError, match="9 documents are to train on"):
        without(documents, texts_of(documents.train))


def test_an_empty_corpus_is_refused_with_its_name(tmp_path):
    with pytest.raises(CorpusError, match=r"a\.jsonl is empty"):
        load_documents(records(tmp_path / "a.jsonl", [" ", "\n"]))


def test_end_of_text_stands_between_documents_alone():
    assert written(token_stream(["ab", "c", "de"], Characters())) == "ab|c|de"
    assert written(token_stream(["ab", "c", "de"], Characters(None))) == "abcde"
    assert written(token_stream(["ab"], Characters())) == "ab"


def test_a_document_that_ends_its_own_text_gets_no_second_end():
    assert written(token_stream(["ab$", "c$", "de"], Characters())) == "ab|c|de"


def test_documents_go_on_across_windows():
    windows = packed_windows(["abcde", "fg", "hijklmn"], Characters(), window=4)
    assert windows.dtype == torch.int64
    assert [written(row) for row in windows] == ["abcd", "e|fg", "|hij", "klmn"]
    long = packed_windows(["abcde", "fg", "hijklmn"], Characters(), window=13)
    assert [written(row) for row in long] == ["abcde|fg|hijk"]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("abc$", max_size=20), max_size=12), st.integers(1, 9), st.integers(1, 90))
def test_windows_are_the_stream_and_a_limit_is_its_beginning(texts, window, tokens):
    stream = token_stream(texts, Characters())
    assert torch.equal(token_stream(texts, Characters(), tokens), stream[:tokens])
    if len(stream) >= window:
        windows = packed_windows(texts, Characters(), window=window)
        whole = len(stream) // window * window
        assert torch.equal(windows.flatten(), stream[:whole])
    assert written(stream).replace("|", "") == "".join(texts).replace("$", "")


def test_a_limit_reads_no_more_than_it_needs():
    tokenizer = Characters()
    documents = ["x" * 100] * 1000
    windows = packed_windows(iter(documents), tokenizer, window=10, tokens=255)
    assert windows.shape == (25, 10)
    assert tokenizer.read < 500
    long = Characters()
    packed_windows(["x" * 10**6], long, window=10, tokens=100)
    assert long.read < 10_000


def test_too_short_a_text_is_refused():
    with pytest.raises(CorpusError, match="it has 5 tokens"):
        packed_windows(["ab", "cd"], Characters(), window=6)
    with pytest.raises(CorpusError, match="it has 0 tokens"):
        packed_windows([], Characters(), window=6)
    with pytest.raises(CorpusError, match="4 tokens with a window of 6"):
        packed_windows(["abcdefgh"], Characters(), window=6, tokens=4)


def test_the_real_tokenizer_ends_documents_with_its_own_token(smollm2):
    _, tokenizer = smollm2
    texts = ["A first document.", "A second one."]
    ids = token_stream(texts, tokenizer)
    assert tokenizer.decode(ids) == f"{texts[0]}{tokenizer.eos_token}{texts[1]}"
    assert int((ids == tokenizer.eos_token_id).sum()) == 1
