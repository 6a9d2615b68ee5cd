"""Text in, windows out: sources, splits, and what is not text."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from kvfold.errors import CorpusError, MissingExtraError
from kvfold.fitting import corpus as corpus_module
from kvfold.fitting.corpus import (
    calibration_windows,
    load_corpus,
    load_text,
    token_windows,
)


class Characters:
    """A tokenizer of one token a character, with a chat template or without."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template
        self.longest = 0

    def __call__(self, text, *, add_special_tokens, verbose):
        assert not add_special_tokens
        self.longest = max(self.longest, len(text))
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, *, tokenize):
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def test_the_default_corpus_is_the_same_every_time_and_long_enough():
    first, second = load_corpus(), load_corpus()
    assert first == second
    assert len(first.train) > 150_000
    assert len(first.held_out) > 15_000


def test_no_paragraph_of_the_default_corpus_is_in_both_parts_or_twice():
    loaded = load_corpus()
    train, held_out = loaded.train.split("\n\n"), loaded.held_out.split("\n\n")
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train)


def test_the_default_corpus_is_prose():
    text = load_corpus().train
    assert "::=" not in text
    assert ">>>" not in text


def test_the_last_part_of_a_file_is_held_out_at_a_line(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n}\n" for n in range(1000)), encoding="utf-8")
    loaded = load_corpus(path)
    assert loaded.train + loaded.held_out == path.read_text(encoding="utf-8")
    assert loaded.train.endswith("\n")
    assert 0.05 < len(loaded.held_out) / len(loaded.train) < 0.15
    assert load_text(path, part="all") == loaded.train + loaded.held_out
    assert load_text(path, part="held_out") == loaded.held_out


def test_text_without_lines_is_still_split(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("ab" * 100, encoding="utf-8")
    loaded = load_corpus(path)
    assert (len(loaded.train), len(loaded.held_out)) == (180, 20)


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second\n", encoding="utf-8")
    (tmp_path / "a.md").write_text("first", encoding="utf-8")
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "third"}\n', encoding="utf-8")
    (tmp_path / "skipped.bin").write_bytes(b"\0")
    assert load_text(tmp_path, part="all") == "first\n\nsecond\n\nthird\n"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "one\u2028two", "answer": 3}, "one\u2028two"),
        ({"question": "why?", "answer": "so"}, "why?\nso"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "<user>hi"),
    ],
)
def test_json_lines_of_each_kind_are_read(tmp_path, record, expected):
    path = tmp_path / "data.jsonl"
    line = json.dumps(record, ensure_ascii=False)
    path.write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    assert load_text(path, part="all", tokenizer=Characters("x")) == f"{expected}\n\n{expected}\n"


def test_bad_json_lines_are_named_by_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": ', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"data\.jsonl, line 2"):
        load_corpus(path)
    path.write_text('{"text": "a"}\n{"body": "b"}', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"line 2 has body"):
        load_corpus(path)
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"line 1 has list"):
        load_corpus(path)


def test_chat_messages_without_a_template_are_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n', encoding="utf-8")
    for tokenizer in (None, Characters()):
        with pytest.raises(CorpusError, match="chat template"):
            load_corpus(path, tokenizer)
    path.write_text('{"messages": [{"role": "user"}]}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"can't render .*line 1"):
        load_corpus(path, Characters("x"))


def test_what_is_not_text_is_refused_with_its_path(tmp_path):
    binary, latin, empty = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    binary.write_bytes(b"abc\0def")
    latin.write_bytes("caf\u00e9".encode("latin-1"))
    empty.write_text(" \n", encoding="utf-8")
    for path, reason in ((binary, "binary"), (latin, "at byte 3"), (empty, "empty")):
        with pytest.raises(CorpusError, match=reason) as caught:
            load_corpus(path)
        assert str(path) in str(caught.value)


def test_a_missing_path_and_a_folder_without_text_are_refused(tmp_path):
    with pytest.raises(CorpusError, match="there is no"):
        load_corpus(tmp_path / "nowhere")
    with pytest.raises(CorpusError, match=r"\.txt"):
        load_corpus(tmp_path)


def test_a_corpus_that_would_not_fit_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "MAX_CHARACTERS", 10)
    (tmp_path / "a.txt").write_text("x" * 6, encoding="utf-8")
    (tmp_path / "b.txt").write_text("x" * 6, encoding="utf-8")
    assert load_text(tmp_path / "a.txt", part="all") == "x" * 6
    with pytest.raises(CorpusError, match="at most 10 bytes"):
        load_corpus(tmp_path)


def test_windows_are_cut_from_one_string_without_overlap():
    windows = token_windows("abcdefghijk", Characters(), window=3)
    assert windows.dtype == torch.int64
    assert ["".join(map(chr, row)) for row in windows.tolist()] == ["abc", "def", "ghi"]


def test_a_limit_on_tokens_gives_the_same_first_windows_and_reads_less():
    text = "0123456789" * 1000
    whole, few = Characters(), Characters()
    every = token_windows(text, whole, window=10)
    some = token_windows(text, few, window=10, tokens=25)
    assert torch.equal(some, every[:2])
    assert few.longest < whole.longest == 10_000


def test_too_short_a_text_says_how_many_tokens_there_are():
    with pytest.raises(CorpusError, match="it has 5 tokens"):
        token_windows("abcde", Characters(), window=6)
    with pytest.raises(CorpusError, match="4 tokens with a window of 6"):
        token_windows("abcdefghi", Characters(), window=6, tokens=4)
    with pytest.raises(CorpusError, match="at least 1 token"):
        token_windows("abc", Characters(), window=0)


def test_calibration_and_held_out_windows_share_no_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(0x4E00 + n) for n in range(2000)), encoding="utf-8")
    train, held_out = calibration_windows(path, Characters(), window=16)
    assert train.shape == (112, 16)
    assert held_out.shape == (12, 16)
    assert not set(train.flatten().tolist()) & set(held_out.flatten().tolist())


def test_a_held_out_part_that_is_too_short_is_told_apart(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x" * 100, encoding="utf-8")
    with pytest.raises(CorpusError, match=r"held-out part of .*text\.txt: .* 10 tokens"):
        calibration_windows(path, Characters(), window=16)


class FakeDatasets:
    def __init__(self, rows):
        self.rows = rows
        self.calls = []

    def load_dataset(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return iter(self.rows)


def test_a_hub_data_set_is_streamed_up_to_its_limit(monkeypatch):
    fake = FakeDatasets([{"body": "abcd"}] * 10)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(corpus_module, "HUB_CHARACTERS", 9)
    text = load_text("hub:owner/name@small:validation:body", part="all")
    assert text == "abcd\n\nabcd\n\nabcd"
    assert fake.calls == [(("owner/name", "small"), {"split": "validation", "streaming": True})]
    with pytest.raises(CorpusError, match="row 0 has body"):
        load_corpus("hub:owner/name")
    with pytest.raises(CorpusError, match="no text field 'text'"):
        load_corpus("hub:owner/name:train:text")


def test_a_hub_data_set_without_its_extra_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"kvfold\[hub\]"):
        load_corpus("hub:owner/name")
    with pytest.raises(CorpusError, match="hub:NAME"):
        load_corpus("hub:")


@pytest.mark.parametrize(
    "name", ["../../x", "./x", "/tmp/x", "a/b/c", "a/..", "~/x", "a--b", "x.git", "", "@small"]
)
def test_what_is_no_name_of_the_hubs_is_not_looked_for_on_disk(monkeypatch, name):
    fake = FakeDatasets([{"text": "mine"}])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(CorpusError, match="by its path alone, without hub:"):
        load_corpus(f"hub:{name}")
    assert fake.calls == []


def test_a_folder_in_the_place_of_a_hub_data_set_is_not_read_for_it(monkeypatch, tmp_path):
    fake = FakeDatasets([{"text": "mine"}])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(CorpusError, match=r"name it as \./owner/name"):
        load_corpus("hub:owner/name")
    assert fake.calls == []


def test_a_hub_data_set_that_fails_is_a_corpus_error(monkeypatch):
    class Failing:
        @staticmethod
        def load_dataset(*args, **kwargs):
            raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", Failing)
    with pytest.raises(CorpusError, match="offline"):
        load_corpus("hub:owner/name")


def test_the_real_tokenizer_needs_no_special_tokens_and_warns_of_nothing(smollm2, caplog):
    _, tokenizer = smollm2
    text = load_text(part="held_out")
    windows = token_windows(text, tokenizer, window=128)
    assert windows.min() > 16  # the first ids are special tokens
    assert tokenizer.decode(windows[0])[:40] == text[:40]
    few = token_windows(text, tokenizer, window=128, tokens=300)
    assert torch.equal(few, windows[:2])
    assert not caplog.records


def test_a_text_in_a_language_that_the_tokenizer_does_not_know_is_refused() -> None:
    from kvfold.models import tiny_hybrid

    _, tokenizer = tiny_hybrid()
    english = "Importing modules is what the reference manual describes in detail. " * 20
    with pytest.raises(CorpusError, match="must be in the model's language"):
        token_windows(english, tokenizer, window=16)
