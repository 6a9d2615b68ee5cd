"""Data files are refused by the line that is bad, whatever is bad about it."""

from __future__ import annotations

import hashlib
import json

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.records import file_digest, read_records

FIELDS = {"text": str, "ids": list}
GOOD = json.dumps({"text": "caf\u00e9\u2028", "ids": [1], "more": None}, ensure_ascii=False)


def write(tmp_path, content):
    path = tmp_path / "records.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_records_come_with_their_lines_and_blank_lines_are_none(tmp_path):
    path = write(tmp_path, f"\ufeff{GOOD}\n\n \n{GOOD}\r\n")
    first, second = read_records(path, FIELDS, what="thing")
    assert first.data == second.data == json.loads(GOOD)
    assert (first.where, second.where) == (f"{path}:1", f"{path}:4")


def test_whole_characters_may_be_written_in_halves(tmp_path):
    path = write(tmp_path, '{"text": "\\ud83d\\ude00", "ids": []}')
    assert read_records(path, FIELDS, what="thing")[0].data["text"] == "\U0001f600"


def test_no_more_are_read_than_asked_for(tmp_path):
    path = write(tmp_path, f"{GOOD}\n{GOOD}\nnonsense\n")
    assert len(read_records(path, FIELDS, what="thing", count=2)) == 2


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"text": "a", "ids":', ":3 must be a JSON object; Expecting value"),
        ("[1, 2]", r":3 must be a JSON object; got \[1, 2\]"),
        ('{"ids": []}', ":3 must be a JSON object with text and ids; text is missing"),
        ('{"text": 7, "ids": []}', ":3 must be a JSON object whose text is a string; got 7"),
        ('{"text": "", "ids": {}}', ":3 must be a JSON object whose ids is a list; got {}"),
        ("caf\u00e9".encode("latin-1"), ":3 must be text in UTF-8; byte 3 of the line is 0xe9"),
        (GOOD.encode("utf-16"), ":3 must be text in UTF-8; byte 0"),
        ('{"text": "wrong", "ids": []}', ":3 is wrong"),
        ('{"text": "\\ud83d!", "ids": []}', r":3 must be .* it has '\\ud83d' without the other"),
        ('{"ids": ' + "[" * 100_000, ":3 must be a JSON object; it is nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, match):
    wrong = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, GOOD.encode() + b"\n\n" + wrong + b"\n")
    with pytest.raises(EvaluationError, match=match):
        read_records(
            path,
            FIELDS,
            what="thing",
            complaint=lambda record: "is wrong" if record["text"] == "wrong" else None,
        )


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path, content):
    with pytest.raises(EvaluationError, match="at least one thing; it has none"):
        read_records(write(tmp_path, content), FIELDS, what="thing")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(EvaluationError, match="can't be read"):
            read_records(path, FIELDS, what="thing")


def test_the_digest_is_of_the_bytes(tmp_path):
    path = write(tmp_path, b"a\r\nb")
    assert file_digest(path) == hashlib.sha256(b"a\r\nb").hexdigest()
