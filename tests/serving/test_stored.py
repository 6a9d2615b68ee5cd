"""Prompts' caches on disk: which are kept, and that they are found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvfold.serving.engine import Engine
from kvfold.serving.plain_rows import folding_nothing
from kvfold.serving.request import Request, Sampling
from kvfold.serving.stored import StoredPrefixes
from kvfold.store.prefix_store import PrefixStore

SYSTEM = tuple(range(10, 50))


def asked(kind: str, *rest: int, length: int = 40) -> Request:
    prompt = (*SYSTEM, *(5 + (7 * n + rest[0]) % 200 for n in range(length)))
    return Request(kind, prompt, 3, sampling=Sampling(temperature=0), top_logprobs=1)


@pytest.fixture
def stored(lane: Any, tmp_path: Path) -> Any:
    """`stored(kind)`: a lane with a store of its own in one folder, blocks of 16 tokens."""

    def make(kind: str) -> Any:
        made = lane(kind)
        store = PrefixStore(tmp_path, block=8)
        plain = made.attachment is None
        attachment = folding_nothing(made.model) if plain else made.attachment
        made.store = StoredPrefixes(store, attachment, block=16, plain=plain)
        return made

    return make


def lengths(folder: Path) -> list[int]:
    """Tokens of every file, by its name."""
    from kvfold.store.prefix_store import tokens_of

    found = [tokens_of(path.stem) for path in folder.iterdir()]
    return sorted(n for n in found if n is not None)


@pytest.mark.parametrize("kind", ["plain", "hybrid", "ced", "latent", "hybrid-ced"])
def test_a_prompt_is_found_again_after_a_restart(
    kind: str, stored: Any, serving: Any, tmp_path: Path
) -> None:
    """The same scores to the last bit, of a server that has never seen the prompt."""
    answers = []
    for _ in range(2):
        made = stored(kind)
        with Engine({kind: made}) as engine:
            answers.append(serving.ask(engine, asked(kind, 1)))
        made.store.close()
    assert [answer.begun.cached_tokens for answer in answers] == [0, 64]
    assert answers[0].scores == answers[1].scores
    assert lengths(tmp_path) == [64]


def test_what_prompts_share_is_kept_once_two_have_come(
    stored: Any, serving: Any, tmp_path: Path
) -> None:
    made = stored("ced")
    with Engine({"ced": made}) as engine:
        for number in (1, 2):
            assert serving.ask(engine, asked("ced", number)).begun.cached_tokens == 0
        made.store.close()
        assert lengths(tmp_path) == [32, 64, 64]
        assert serving.ask(engine, asked("ced", 3)).begun.cached_tokens == 32


def test_a_damaged_file_is_dropped_and_made_again(
    stored: Any, serving: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    for damage in (True, False):
        made = stored("ced")
        with Engine({"ced": made}) as engine:
            answers.append(serving.ask(engine, asked("ced", 1)))
        made.store.close()
        (file,) = (path for path in tmp_path.iterdir() if lengths(tmp_path) and path.stat().st_size)
        content = bytearray(file.read_bytes())
        if damage:
            content[-9] ^= 1
            file.write_bytes(content)
    assert [answer.begun.cached_tokens for answer in answers] == [0, 0]
    assert answers[0].scores == answers[1].scores
    assert "dropped the stored cache" in caplog.text


def test_a_store_that_fails_costs_nothing_but_the_hit(
    stored: Any, serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = stored("ced")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(made.store.store, "longest", fail)
    monkeypatch.setattr(made.store.store, "keep_state", fail)
    with Engine({"ced": made}) as engine:
        assert serving.ask(engine, asked("ced", 1)).reason == "length"
    made.store.close()
    assert "was not read" in caplog.text
    assert "was not kept" in caplog.text
