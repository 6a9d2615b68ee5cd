"""A tiny model and tokenizer on disk, as a user would have them."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvfold.cli import build_app


@pytest.fixture(scope="session")
def model_folder(tiny_model, byte_tokenizer, tmp_path_factory):
    """`model_folder(family)`: a folder with a tiny model and a tokenizer of bytes."""

    def make(family, name):
        folder = tmp_path_factory.mktemp("models") / name
        tiny_model(family, vocab_size=len(byte_tokenizer)).save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_folder(model_folder):
    """A folder with a tiny Llama of 261 tokens and a tokenizer of bytes."""
    return model_folder("llama", "tiny")


@pytest.fixture(scope="session")
def hybrid_folder(model_folder):
    """The same with a tiny Qwen3.5: layers 3 and 7 attend, the others are linear attention."""
    return model_folder("qwen3_5", "hybrid")


@pytest.fixture(scope="session")
def sliding_folder(model_folder):
    """The same with a tiny Gemma 3: layers 0 and 3 attend to a sliding window."""
    return model_folder("gemma3", "sliding")


@pytest.fixture(scope="session")
def kvfold():
    """`kvfold("fit", ...)`: run the command, as if from a shell."""
    app = build_app()

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A few thousand bytes of text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    sentences = (
        f"Line {n}: {n * n} is the square of {n}, and {n % 7} its week." for n in range(90)
    )
    path.write_text("\n".join(sentences))
    return path


@pytest.fixture(scope="session")
def long_text_file(tmp_path_factory):
    """Text whose held-out tenth fills a window of 1,024 tokens."""
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text("\n".join(f"{n} times {n % 13} makes {n * (n % 13)}." for n in range(650)))
    return path


@pytest.fixture(scope="session")
def addon_folder(kvfold, tiny_folder, text_file, tmp_path_factory):
    """An add-on that the command `fit` made."""
    folder = tmp_path_factory.mktemp("add-ons") / "my-addon"
    done = kvfold(
        "fit", tiny_folder, "--preset", "csa2", "--corpus", text_file, "--tokens", 2048,
        "--held-out-tokens", 128, "--window", 64, "-o", folder,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="session")
def skip_folder(kvfold, tiny_folder, text_file, tmp_path_factory):
    """An add-on whose prompts skip layers 3 to 5 but for their last 16 tokens and 4 anchors."""
    folder = tmp_path_factory.mktemp("add-ons") / "skipping"
    plan = folder.with_name("skipping.yaml")
    plan.write_text("window: 8\ndepth: [{method: ced, split: 3, layers: [3, 4, 5]}]\n")
    done = kvfold(
        "fit", tiny_folder, "--plan", plan, "--prefill", "skip", "--replay", 16, "--corpus",
        text_file, "--tokens", 2048, "--held-out-tokens", 128, "--window", 64, "-o", folder,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return folder
