"""The held-out report says what a fit is worth."""

from __future__ import annotations

import pytest
import torch

from kvfold.anatomy import anatomy, attention_module
from kvfold.fitting.report import report_fit
from kvfold.methods import build_pipelines
from kvfold.plan import Plan

CLOSE = 1e-5
"""The report rounds to six digits."""


def _windows(count=3, seq=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count, seq), generator=generator)


def _plan(entry, **keys):
    return Plan.from_dict({"anchors": 2, "window": 4, "depth": [entry], **keys})


def _whole_code(model):
    """A code that is the stack itself: everything comes back."""
    shape = anatomy(model)
    layers = list(shape.foldable_layers)[-2:]
    width = shape.layers[layers[0]].kv_width
    plan = _plan({"method": "latent", "layers": layers, "rank": 4 * width})
    pipelines = build_pipelines(plan, shape).to(model.dtype)
    method = pipelines[0].depth
    eye = torch.eye(4 * width, dtype=model.dtype)
    with torch.no_grad():
        method.encoder.weight.copy_(eye)
        for index, layer in enumerate(layers):
            method.keys[str(layer)].weight.copy_(eye[index * width : (index + 1) * width])
            start = (2 + index) * width
            method.values[str(layer)].weight.copy_(eye[start : start + width])
    return plan, pipelines, layers


def test_everything_given_back_is_one_on_every_family(tiny_model, family):
    model = tiny_model(family)
    plan, pipelines, layers = _whole_code(model)
    report = report_fit(model, plan, pipelines, _windows())
    assert report["held_out_tokens"] == 60
    for layer in layers:
        found = report["layers"][str(layer)]
        assert found["method"] == "latent"
        for key in ("keys_r2", "values_r2", "attention_cosine"):
            assert found[key] == pytest.approx(1.0, abs=CLOSE), key


def test_zero_weights_explain_nothing(tiny_model):
    model = tiny_model("llama", dtype=torch.float64)
    plan, pipelines, layers = _whole_code(model)
    with torch.no_grad():
        for parameter in pipelines.parameters():
            parameter.zero_()
    report = report_fit(model, plan, pipelines, _windows())
    for layer in layers:
        found = report["layers"][str(layer)]
        assert found["keys_r2"] <= 0 and found["values_r2"] <= 0
        assert found["attention_cosine"] < 0.95


def test_exact_side_is_the_models_own_attention_output(tiny_model, family, monkeypatch):
    """Attention over exact keys, gated and projected, is what the attention module gives."""
    from kvfold.fitting.attention_output import LayerAttention

    model = tiny_model(family, dtype=torch.float64)
    plan, pipelines, layers = _whole_code(model)
    outputs = []
    exact = LayerAttention.exact

    def recording(self):
        output = exact(self)
        outputs.append((self.fold.index, output))
        return output

    monkeypatch.setattr(LayerAttention, "exact", recording)
    ids = _windows(1)
    report_fit(model, plan, pipelines, ids)
    taken = {}
    handles = [
        attention_module(model, layer).o_proj.register_forward_hook(
            lambda _, __, output, layer=layer: taken.update({layer: output})
        )
        for layer in layers
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    assert outputs
    for layer, output in outputs:
        torch.testing.assert_close(output, taken[layer][:, -output.shape[1] :], rtol=0, atol=1e-6)


def test_windows_without_history_have_no_cosine(tiny_model):
    model = tiny_model("llama")
    plan, pipelines, layers = _whole_code(model)
    report = report_fit(model, plan.replace(window=64), pipelines, _windows())
    assert report["mean_attention_cosine"] is None
    assert report["layers"][str(layers[0])]["attention_cosine"] is None


def test_plan_without_weights_has_an_empty_report(tiny_model):
    model = tiny_model("llama")
    plan = _plan({"method": "drop", "layers": [2]})
    assert report_fit(model, plan, build_pipelines(plan, anatomy(model)), _windows()) == {}
