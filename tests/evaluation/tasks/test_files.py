"""Bad data files are told by name and line."""

from __future__ import annotations

import hashlib

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.tasks import fidelity, needle, perplexity, ruler, turns
from kvfold.evaluation.tasks.files import data_file, read_file
from kvfold.evaluation.tasks.ruler_prompts import word_list
from kvfold.evaluation.tasks.settings import TaskSettings


def written(tmp_path, data, name="file.txt"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_a_file_is_found_in_the_folder_or_is_the_one_named(tmp_path, monkeypatch):
    path = written(tmp_path, b"text\n")
    for settings in (TaskSettings(tmp_path), TaskSettings(path)):
        assert data_file(settings, "file.txt").text == "text\n"
    monkeypatch.setenv("KVFOLD_DATA", str(tmp_path))
    assert data_file(TaskSettings(None), "file.txt").sha256 == hashlib.sha256(b"text\n").hexdigest()
    monkeypatch.delenv("KVFOLD_DATA")
    with pytest.raises(EvaluationError, match=r"needs file\.txt in a folder of data sets"):
        data_file(TaskSettings(None), "file.txt")


def test_marks_and_line_ends_of_other_systems_are_left_out(tmp_path):
    path = written(tmp_path, b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert read_file(path, "file").text == "one\ntwo\nthree"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", r"file\.txt is empty"),
        (b" \n\n", r"file\.txt is empty"),
        ("one\ntwo\ncaf\u00e9".encode("latin-1"), r"UTF-8 text; .*file\.txt:3 is not"),
        ("text".encode("utf-16"), r"file\.txt:1 holds a zero byte"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, data, match):
    with pytest.raises(EvaluationError, match=match):
        read_file(written(tmp_path, data), "file")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(EvaluationError, match=r"gone\.txt: No such file"):
        read_file(tmp_path / "gone.txt", "gone")


@pytest.mark.parametrize("make", [perplexity.make, needle.make, turns.make, fidelity.make])
def test_a_text_that_is_too_short_is_refused_with_its_last_line(tmp_path, characters, make):
    path = written(tmp_path, b"one line\nand another\n")
    match = r"file\.txt must have at least \d+ tokens; it ends at line 2 after 21"
    with pytest.raises(EvaluationError, match=match):
        make(TaskSettings(path, tokenizer=characters, lengths=(200,)))


@pytest.mark.parametrize("make", [perplexity.make, needle.make, turns.make, fidelity.make])
def test_a_text_in_another_language_is_refused(tmp_path, characters, make):
    path = written(tmp_path, ("\u4e2d\u6587" * 600).encode())
    with pytest.raises(EvaluationError, match=r"file\.txt: a text must be in the model's language"):
        make(TaskSettings(path, tokenizer=characters, lengths=(200,)))


def test_a_text_shorter_than_asked_for_gives_the_windows_that_it_has(tmp_path, characters):
    path = written(tmp_path, b"word " * 50)
    task = perplexity.make(TaskSettings(path, tokenizer=characters, lengths=(100,)))
    assert [item["id"] for item in task.items()] == ["100/0", "100/1"]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"input": "a"', r"file\.jsonl:3 must be a JSON object"),
        (b'{"input": "a"}', r"file\.jsonl:3 must be .* outputs is missing"),
        (b'{"input": "", "outputs": ["b"]}', r"file\.jsonl:3 must have an input and outputs"),
        (b'{"input": "a", "outputs": []}', r"file\.jsonl:3 must have an input and outputs"),
        (b'{"input": "a", "outputs": [7]}', r"file\.jsonl:3 must have an input and outputs"),
    ],
)
def test_a_record_that_is_none_is_refused_with_its_line(tmp_path, characters, line, match):
    good = b'{"input": "question", "outputs": ["answer"], "more": 1}\n'
    path = written(tmp_path, good + b"\n" + line + b"\n", "file.jsonl")
    with pytest.raises(EvaluationError, match=match):
        ruler.make_from_file(TaskSettings(path, tokenizer=characters))


def test_a_word_list_needs_words(tmp_path):
    path = written(tmp_path, b"one\ntwo words\nThree\n")
    with pytest.raises(EvaluationError, match=r"file\.txt has 1$"):
        word_list(read_file(path, "file"))
