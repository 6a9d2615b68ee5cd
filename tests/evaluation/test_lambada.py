"""LAMBADA's last word: what counts as right, and files that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.lambada import lambada, read_passages, share

SENTENCE = "Alice went to the old market and bought seven green apples"
PASSAGES = [
    f"{SENTENCE}. {SENTENCE}. {SENTENCE}",
    f"{SENTENCE}. {SENTENCE}. {SENTENCE[:-6]} guitars",
]


def test_a_last_word_is_right_if_greedy_decoding_gives_it(smollm2: Any) -> None:
    model, tokenizer = smollm2
    right = lambada(model, PASSAGES, tokenizer)
    assert right == [True, False]
    assert share(right).value == 0.5


def test_it_is_what_generate_gives(smollm2: Any) -> None:
    model, tokenizer = smollm2
    for passage, judged in zip(PASSAGES, lambada(model, PASSAGES, tokenizer), strict=True):
        context, word = passage.rsplit(" ", 1)
        ids = tokenizer(context, return_tensors="pt", add_special_tokens=False).input_ids
        count = len(tokenizer(passage).input_ids) - ids.shape[1]
        made = model.generate(input_ids=ids, max_new_tokens=count, do_sample=False)
        assert (tokenizer.decode(made[0, ids.shape[1] :]) == f" {word}") == judged


def test_passages_are_read_up_to_a_count(tmp_path: Path) -> None:
    path = tmp_path / "passages.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": f"one two {n}"}) for n in range(5)))
    assert read_passages(path, 3) == ["one two 0", "one two 1", "one two 2"]
    assert len(read_passages(path)) == 5


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"text": "a b"}\n{"text":', ":2 must be a JSON object"),
        ('{"txt": "a b"}', ":1 must be a JSON object"),
        ('{"text": 7}', ":1 must be a JSON object"),
        ('{"text": "word"}', "at least two words"),
        ("", "at least one passage"),
    ],
)
def test_a_bad_file_is_refused_by_its_line(tmp_path: Path, content: str, match: str) -> None:
    path = tmp_path / "passages.jsonl"
    path.write_text(content)
    with pytest.raises(EvaluationError, match=match):
        read_passages(path)


def test_another_encoding_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "passages.jsonl"
    path.write_bytes('{"text": "caf\u00e9 noir"}'.encode("latin-1"))
    for wrong in (path, tmp_path / "none.jsonl"):
        with pytest.raises(EvaluationError, match="UTF-8"):
            read_passages(wrong)
