"""A fingerprint knows its model in any dtype, and no other."""

from __future__ import annotations

import pytest
import torch

from kvfold.anatomy import text_decoder
from kvfold.errors import AddOnError
from kvfold.store.fingerprint import Fingerprint


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("used", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_same_model_in_another_dtype_agrees(tiny_model, saved, used):
    Fingerprint.of(tiny_model("llama").to(saved)).check(tiny_model("llama").to(used))


def test_model_that_was_rounded_and_widened_agrees(tiny_model):
    rounded = tiny_model("qwen3").to(torch.bfloat16).float()
    Fingerprint.of(rounded).check(tiny_model("qwen3"))
    Fingerprint.of(tiny_model("qwen3")).check(rounded)


def test_every_family_agrees_with_itself_and_survives_json(tiny_model, family):
    model = tiny_model(family)
    made = Fingerprint.of(model)
    again = Fingerprint.from_dict(made.to_dict())
    assert again == made
    again.check(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fine_tune_of_the_same_shape_is_refused_with_both_names(tiny_model, dtype):
    base, tuned = tiny_model("llama"), tiny_model("llama")
    base.config.name_or_path, tuned.config.name_or_path = "maker/base", "maker/tuned"
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in text_decoder(tuned).layers.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(1e-3 * parameter.abs() * noise)
    with pytest.raises(AddOnError, match=r"'maker/base'.*'maker/tuned'.*fine-tune"):
        Fingerprint.of(base).check(tuned.to(dtype))


def test_other_shape_says_what_differs(tiny_model):
    made = Fingerprint.of(tiny_model("llama"))
    with pytest.raises(AddOnError, match="its number of layers is 4 and not 6"):
        made.check(tiny_model("llama", num_hidden_layers=4))
    with pytest.raises(AddOnError, match="its architecture is Qwen2 and not Llama"):
        made.check(tiny_model("qwen2"))


def test_other_rotary_settings_are_refused(tiny_model):
    made = Fingerprint.of(tiny_model("llama"))
    other = {"rope_type": "default", "rope_theta": 5000.0}
    with pytest.raises(AddOnError, match="rotary settings"):
        made.check(tiny_model("llama", rope_parameters=other))


def test_local_path_is_not_told(tiny_model):
    model = tiny_model("llama")
    model.config.name_or_path = "/home/someone/models/mine"
    assert Fingerprint.of(model).name == "mine"


@pytest.mark.parametrize("data", [None, 3, {}, {"family": "nothing"}])
def test_unreadable_fingerprint_is_refused(data):
    with pytest.raises(AddOnError, match="which base model"):
        Fingerprint.from_dict(data)


def test_resized_vocabulary_is_the_same_model(tiny_model):
    made = Fingerprint.of(tiny_model("llama"))
    resized = tiny_model("llama")
    resized.resize_token_embeddings(128, mean_resizing=False)
    made.check(resized)
