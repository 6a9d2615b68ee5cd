"""The tiny model and the text of tests that train on a few sums."""

from __future__ import annotations

import pytest

from .tiny_recipes import write_sums


@pytest.fixture(scope="module")
def model(tiny_model):
    """With a token for every character that `tiny_recipes.Letters` knows."""
    return tiny_model("llama", vocab_size=160)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_sums(folder)
    return folder
