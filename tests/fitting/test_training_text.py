"""Recipes' texts: a mixture of rows, and held-out rows of every part that no part trains on."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

from kvfold.errors import CorpusError
from kvfold.fitting.packing import load_documents
from kvfold.fitting.self_text import self_generated
from kvfold.fitting.training_text import TextPart, build_mixture

from .tiny_recipes import Letters


def text(ids):
    return "".join("|" if i == 2 else chr(i - 3) for i in ids.flatten().tolist())


def records(path, name, count=100, length=8):
    """Different texts of some characters each, in which every eight characters name the text."""
    lines = [json.dumps({"text": f"{name}{n:04}. " * (length // 8)}) for n in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def sources(tmp_path):
    return [records(tmp_path / f"{name}.jsonl", name * 2) for name in "abc"]


def built(parts, model=None, **options):
    defaults = {"window": 9, "seed": 0, "held_out_tokens": 9 * 8}
    return build_mixture(parts, model, Letters(), **{**defaults, **options})


def test_parts_are_mixed_by_weight_and_held_out_by_weight(sources):
    parts = [TextPart(s, weight) for s, weight in zip(sources, (5, 2, 1), strict=True)]
    mixture, held_out = built(parts)
    assert [part.name for part in mixture.parts] == [str(source) for source in sources]
    assert list(mixture.shares(1, 800).values()) == [500, 200, 100]
    assert mixture.seq == 9
    # A row is a text of eight characters and the end of text after it.
    assert text(held_out).replace("0", "").split("|")[:-1] == [
        *["aa9. ", "aa91. ", "aa92. ", "aa93. ", "aa94. "],
        *["bb9. ", "bb91. ", "cc9. "],
    ]


def test_tokens_limit_what_is_trained_on_and_not_what_is_held_out(sources):
    many, few = built([TextPart(sources[0])]), built([TextPart(sources[0], tokens=20)])
    assert len(many.mixture.parts[0].windows) == 89  # 90 texts, with no end after the last
    assert torch.equal(few.mixture.parts[0].windows, many.mixture.parts[0].windows[:2])
    assert torch.equal(few.held_out, many.held_out)


def test_the_default_corpus_and_a_hub_data_set_are_parts_as_well(monkeypatch):
    class Rows:
        @staticmethod
        def load_dataset(*args, **kwargs):
            return iter({"question": f"{n}?", "answer": "x" * 50} for n in range(40))

    monkeypatch.setitem(sys.modules, "datasets", Rows)
    mixture, held_out = built([TextPart(), TextPart("hub:owner/name")])
    assert [part.name for part in mixture.parts] == ["pydoc_data.topics", "hub:owner/name"]
    assert text(held_out[:4]) in load_documents().held_out[0]
    assert text(held_out[4:]).startswith("36?\nxxx")


def test_a_part_with_little_held_out_text_lowers_the_share_of_all(tmp_path, sources):
    small = records(tmp_path / "small.jsonl", "zz", count=25)
    parts = [TextPart(sources[0], 3), TextPart(small, 1)]
    _, held_out = built(parts, held_out_tokens=9 * 1000)
    # Of 25 texts three are held out; the last has no end after it, so they fill two windows.
    assert text(held_out).count("zz") == 2
    # Ten rows are 7.5 and 2.5; of eleven they would be 8.25 and 2.75, and so 8 and 3.
    assert text(held_out).count("aa") == 8
    _, alone = built(parts[:1], held_out_tokens=9 * 1000)
    assert len(alone) == 9


def test_what_one_part_holds_out_no_other_trains_on(tmp_path, sources):
    held_out = load_documents(sources[0]).held_out
    copies = [*held_out[:3], *(f"dd{n:04}. " for n in range(60))]
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"text": f" {c}"}) for c in copies), encoding="utf-8")
    alone, _ = built([TextPart(other)])
    assert held_out[0].strip() in text(alone.parts[0].windows)
    mixture, checked = built([TextPart(other), TextPart(sources[0])])
    trained = "".join(text(part.windows) for part in mixture.parts)
    names = [set(re.findall(r"[ad]{2}\d{4}", ids)) for ids in (trained, text(checked))]
    assert len(names[0]) > 100 < 20 * len(names[1])
    assert not names[0] & names[1]
    for document in held_out:
        assert document.strip() not in trained


def test_the_same_text_twice_is_refused(tmp_path, sources, monkeypatch):
    folder = sources[0].parent
    monkeypatch.chdir(folder)
    for parts in (
        [TextPart(), TextPart()],
        [TextPart(sources[0]), TextPart(folder)],
        [TextPart(folder), TextPart(sources[0])],
        [TextPart("a.jsonl"), TextPart(sources[0])],
        [TextPart("hub:a/b"), TextPart("hub:a/b")],
        [TextPart("self", tokens=9), TextPart("self", tokens=9)],
    ):
        with pytest.raises(CorpusError, match="must be different texts"):
            built(parts)
    with pytest.raises(CorpusError, match="at least one part"):
        built([])


def test_the_models_own_text_is_a_part_and_its_first_rows_are_held_out(model, sources):
    parts = [TextPart(sources[0], 1), TextPart("self", 3, tokens=9 * 10)]
    mixture, held_out = built(parts, model, batch=4)
    rows = self_generated(model, Letters(), tokens=9 * 16, window=9, seed=0, batch=4)
    assert torch.equal(held_out[2:], rows[:6])
    assert torch.equal(mixture.parts[1].windows, rows[6:])
    more, same = built([parts[0], TextPart("self", 3, tokens=9 * 20)], model, batch=4)
    assert torch.equal(same, held_out)
    assert torch.equal(more.parts[1].windows[:10], mixture.parts[1].windows)


def test_settings_of_the_models_own_text_are_passed_on(model, tmp_path):
    path = tmp_path / "self.safetensors"
    options = {"temperature": 0.5, "top_p": 0.9, "prompts": ["abc"], "batch": 3}
    part = TextPart("self", tokens=18)
    windows = built([part], model, file=path, held_out_tokens=9, **options).mixture.parts[0].windows
    assert path.exists()
    rows = self_generated(model, Letters(), tokens=27, window=9, seed=0, file=path, **options)
    assert torch.equal(windows, rows[1:])


def test_rows_that_the_model_writes_again_are_not_in_both(model):
    part = TextPart("self", tokens=9 * 30)
    mixture, held_out = built([part], model, window=2, held_out_tokens=2 * 30, top_p=0.5)
    trained, checked = mixture.parts[0].windows.tolist(), held_out.tolist()
    assert trained
    assert not {tuple(row) for row in trained} & {tuple(row) for row in checked}
    with pytest.raises(CorpusError, match="times the same"):
        built([part], model, window=4, held_out_tokens=4, top_p=1e-6)


def test_a_folder_named_self_is_reached_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "self").mkdir()
    records(tmp_path / "self" / "a.jsonl", "aa")
    mixture, _ = built([TextPart("./self")])
    assert text(mixture.parts[0].windows).startswith("aa0000. |aa0001. |")


def test_too_short_a_part_is_named_with_which_half_of_it(tmp_path, sources):
    short = tmp_path / "short.txt"
    short.write_text("x" * 60, encoding="utf-8")
    with pytest.raises(CorpusError, match=r"held-out part of .*short\.txt: .* 6 tokens"):
        built([TextPart(sources[0]), TextPart(short)])
    with pytest.raises(CorpusError, match=r"^.*a\.jsonl: tokens must be at least one window"):
        built([TextPart(sources[0], tokens=8)])
    with pytest.raises(CorpusError, match="8 tokens with a window of 9"):
        built([TextPart("self", tokens=8)])
    with pytest.raises(CorpusError, match=r"each of 3 parts must have a held-out window.* 2"):
        built([TextPart(source) for source in sources], held_out_tokens=26)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight": 0}, "pydoc_data.topics has 0"),
        ({"weight": float("inf")}, "finite"),
        ({"tokens": 0}, "at least 1"),
        ({"source": "self"}, "how many tokens"),
    ],
)
def test_parts_that_make_no_sense_are_refused(options, reason):
    with pytest.raises(CorpusError, match=reason):
        TextPart(**options)
