"""The whole closed-form fit on tiny models."""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.anatomy import anatomy, text_decoder
from kvfold.errors import CorpusError, FitError, PlanError
from kvfold.fitting import closed_form, components
from kvfold.fitting.fit import fit
from kvfold.methods import Source, unit_rms_heads
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.runtime.capture import capture

PERFECT = 1 - 1e-6
"""R^2 where the target is a linear function of the features, ridge 1e-5."""


def _windows(count=24, seq=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count, seq), generator=generator)


def _plan(*entries, **keys):
    return Plan.from_dict({"anchors": 2, "window": 4, "depth": list(entries), **keys})


def _foldable(model):
    return list(anatomy(model).foldable_layers)


def _state(addon):
    return addon.pipelines.state_dict()


def test_every_kind_of_entry_is_fitted_on_every_family(tiny_model, family):
    model = tiny_model(family)
    layers = _foldable(model)
    first = layers[0]
    last = layers[-1]
    plans = [
        _plan({"method": "ced", "split": first, "layers": layers}),
        _plan({"method": "csa2", "source": first, "readers": [last]}),
        _plan({"method": "csa2", "source": first, "readers": [last], "form": "separate"}),
        _plan({"method": "latent", "layers": layers, "rank": 24}),
        _plan({"method": "latent", "layers": layers, "rank": 8, "value_rank": 12}),
        _plan({"method": "latent", "layers": layers, "rank": 8, "split": first}),
        _plan(
            {"method": "ced", "split": first, "layers": [first]},
            {"method": "csa2", "source": first, "readers": [last]},
        ),
    ]
    held_out = _windows(4, seed=1)
    for plan in plans:
        addon = fit(model, plan, _windows(), held_out, progress=False)
        addon.check_base(model)
        assert set(addon.report["layers"]) == {str(n) for n in plan.folded_layers}
        for values in addon.report["layers"].values():
            assert math.isfinite(values["keys_r2"])  # random layers need not predict each other
            assert 0.1 < values["attention_cosine"] <= 1


def test_first_layers_keys_and_values_are_linear_in_the_normalised_embedding(tiny_model):
    model = tiny_model("llama", dtype=torch.float64)
    plan = _plan({"method": "ced", "split": 0, "layers": [0]})
    addon = fit(model, plan, _windows(), _windows(4, seed=1), progress=False)
    layer = addon.report["layers"]["0"]
    assert layer["keys_r2"] > PERFECT and layer["values_r2"] > PERFECT
    assert layer["attention_cosine"] > PERFECT


def test_reader_that_is_linear_in_its_source_is_fitted_exactly(tiny_model):
    model = tiny_model("qwen3_5", dtype=torch.float64)
    source, reader = _foldable(model)
    decoder = text_decoder(model)
    with torch.no_grad():  # the layers between add nothing, so both see the same hidden states
        for index in range(source, reader):
            decoder.layers[index].mlp.down_proj.weight.zero_()
        decoder.layers[source].self_attn.o_proj.weight.zero_()
        for index in range(source + 1, reader):
            decoder.layers[index].linear_attn.out_proj.weight.zero_()
        one, other = decoder.layers[source], decoder.layers[reader]
        other.input_layernorm.weight.copy_(one.input_layernorm.weight)
        mix = torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        other.self_attn.v_proj.weight.copy_(mix @ one.self_attn.v_proj.weight)
    plan = _plan({"method": "csa2", "source": source, "readers": [reader], "form": "separate"})
    addon = fit(model, plan, _windows(), _windows(4, seed=1), ridge=1e-12, progress=False)
    assert addon.report["layers"][str(reader)]["values_r2"] > PERFECT
    weight = addon.pipelines[0].depth.values[str(reader)].base.weight
    torch.testing.assert_close(weight, mix, rtol=1e-3, atol=1e-3)


def test_code_of_full_rank_gives_everything_back(tiny_model):
    model = tiny_model("qwen2", dtype=torch.float64)
    plan = _plan({"method": "latent", "layers": [2, 3], "rank": 128})
    addon = fit(model, plan, _windows(), _windows(4, seed=1), progress=False)
    for values in addon.report["layers"].values():
        assert values["keys_r2"] > PERFECT and values["values_r2"] > PERFECT
        assert values["attention_cosine"] > PERFECT


def test_keys_under_a_norm_are_fitted_to_their_directions(tiny_model):
    model = tiny_model("qwen3", dtype=torch.float64)
    plan = _plan({"method": "latent", "layers": [2, 3], "rank": 128})
    addon = fit(model, plan, _windows(), progress=False)
    method, source = addon.pipelines[0].depth, Source("keys", 3)
    seen = capture(model, anatomy(model), set(method.inputs), _windows(2, seed=1))
    keys, _ = method.decode(3, method.encode(seen))
    torch.testing.assert_close(keys, unit_rms_heads(seen[source], 16), rtol=1e-6, atol=1e-6)


def test_readers_of_a_regenerated_source_are_fitted_on_what_will_be_stored(tiny_model):
    model = tiny_model("llama", dtype=torch.float64)
    ced = {"method": "ced", "split": 2, "layers": [2]}
    csa2 = {"method": "csa2", "source": 2, "readers": [4]}
    addon = fit(
        model, _plan(ced, csa2, anchors=0), _windows(), progress=False, ridge=1e-9, key_dispersion=0
    )
    alone = fit(
        model, _plan(csa2, anchors=0), _windows(), progress=False, ridge=1e-9, key_dispersion=0
    )
    method = addon.pipelines[0].depth
    seen = capture(model, anatomy(model), {*method.inputs, Source("keys", 4)}, _windows())
    code = method.encode(seen)

    def error(reader):
        return float((reader.decode(4, code)[0] - seen[Source("keys", 4)]).pow(2).mean())

    assert error(method) < error(alone.pipelines[0].depth)


def test_anchors_are_left_out_of_the_sums(tiny_model):
    model = tiny_model("llama", dtype=torch.float64)
    entry = {"method": "csa2", "source": 1, "readers": [3]}
    tokens = _windows()
    other = tokens.clone()
    fitted = fit(model, _plan(entry, anchors=2), tokens, progress=False)
    method = fitted.pipelines[0].depth
    seen = capture(model, anatomy(model), {*method.inputs, Source("values", 3)}, other)
    x = method.encode(seen)[:, 2:].reshape(-1, 64)
    y = seen[Source("values", 3)][:, 2:].reshape(-1, 32)
    x, y = x - x.mean(0), y - y.mean(0)
    gram = x.T @ x
    gram += 1e-5 * gram.diagonal().mean() * torch.eye(64)
    expected = torch.linalg.solve(gram, x.T @ y).T
    torch.testing.assert_close(method.values["3"].base.weight, expected, rtol=1e-6, atol=1e-6)


def _interrupted(monkeypatch, after):
    calls = iter(range(1000))
    plain = closed_form.capture

    def failing(*args):
        if next(calls) >= after:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(closed_form, "capture", failing)


PLANS = {
    "two stages": _plan(
        {"method": "ced", "split": 2, "layers": [2]},
        {"method": "csa2", "source": 2, "readers": [3, 4]},
    ),
    "a code": _plan({"method": "latent", "layers": [1, 2, 3, 4], "rank": 20}),
}


@pytest.mark.parametrize("after", [0, 3, 5, 8, 10])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_resumed_fit_is_bit_equal_to_an_uninterrupted_one(
    tiny_model, tmp_path, monkeypatch, plan, after
):
    model = tiny_model("llama")
    path = tmp_path / "fit.ckpt"
    settings = {"progress": False, "batch": 4, "checkpoint": path, "checkpoint_every": 2}
    whole = fit(model, plan, _windows(), progress=False, batch=4)
    with monkeypatch.context() as patched:
        _interrupted(patched, after)
        try:
            fit(model, plan, _windows(), **settings)
        except KeyboardInterrupt:
            assert path.exists() == (after > 2)
    resumed = fit(model, plan, _windows(), **settings)
    assert list(tmp_path.iterdir()) == []
    for name, tensor in _state(whole).items():
        assert torch.equal(tensor, _state(resumed)[name]), name


def test_sketched_fit_resumes_bit_equal(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("kvfold.fitting.tasks.SKETCH_WIDTH", 32)
    monkeypatch.setattr(components, "EXACT_WIDTH", 32)
    model, path = tiny_model("llama"), tmp_path / "fit.ckpt"
    plan = _plan({"method": "latent", "layers": [1, 2, 3, 4], "rank": 16})
    settings = {"progress": False, "batch": 4, "checkpoint": path, "checkpoint_every": 1}
    whole = fit(model, plan, _windows(), **settings)
    with monkeypatch.context() as patched:
        _interrupted(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            fit(model, plan, _windows(), **settings)
    resumed = fit(model, plan, _windows(), **settings)
    for name, tensor in _state(whole).items():
        assert torch.equal(tensor, _state(resumed)[name]), name


def test_checkpoint_of_another_job_is_refused_and_kept(tiny_model, tmp_path, monkeypatch):
    model, path = tiny_model("llama"), tmp_path / "fit.ckpt"
    settings = {"progress": False, "batch": 4, "checkpoint": path, "checkpoint_every": 1}
    with monkeypatch.context() as patched:
        _interrupted(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            fit(model, PLANS["a code"], _windows(), **settings)
    before = path.read_bytes()
    with pytest.raises(FitError, match="must belong to this fit"):
        fit(model, PLANS["two stages"], _windows(), **settings)
    with pytest.raises(FitError, match="must belong to this fit"):
        fit(model, PLANS["a code"], _windows(seed=7), **settings)
    assert path.read_bytes() == before


def test_damaged_checkpoint_is_refused(tiny_model, tmp_path):
    path = tmp_path / "fit.ckpt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(FitError, match="delete"):
        fit(tiny_model("llama"), PLANS["a code"], _windows(), progress=False, checkpoint=path)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(0, 32, dtype=torch.long), "at least one token"),
        (torch.zeros(32, dtype=torch.long), "shape"),
        (_windows(2, 8), "got 12 in 2 windows of 8"),
        (_windows(9, 2), "got 0"),
    ],
)
def test_too_little_text_says_how_much_is_needed(tiny_model, tokens, message):
    with pytest.raises(CorpusError, match=message):
        fit(tiny_model("llama"), PLANS["two stages"], tokens, progress=False)


def test_plan_for_another_model_is_refused(tiny_model):
    plan = _plan({"method": "latent", "layers": [40], "rank": 4})
    with pytest.raises(PlanError, match="layer 40"):
        fit(tiny_model("llama"), plan, _windows(), progress=False)


def test_non_finite_activations_name_the_layer(tiny_model):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[3].self_attn.v_proj.weight[0, 0] = float("inf")
    with pytest.raises(FitError, match="values of layer 3"):
        fit(model, PLANS["two stages"], _windows(), progress=False)


def test_model_is_left_as_it_was(tiny_model):
    model = tiny_model("qwen3_5")
    model.train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    plan = _plan({"method": "latent", "layers": _foldable(model), "rank": 8})
    fit(model, plan, _windows(), _windows(2, seed=1), progress=False)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_plan_without_weights_needs_no_pass(tiny_model):
    plan = _plan({"method": "drop", "layers": [2, 3]}, {"method": "identity", "layers": [4]})
    addon = fit(tiny_model("llama"), plan, _windows(1, 4), _windows(1), progress=False)
    assert addon.parameter_bytes() == 0
    assert addon.report["fit"]["passes"] == 0


def test_addon_has_the_models_dtype(tiny_model):
    model = tiny_model("llama", dtype=torch.bfloat16)
    addon = fit(model, PLANS["a code"], _windows(), _windows(2, seed=1), progress=False)
    assert {p.dtype for p in addon.pipelines.parameters()} == {torch.bfloat16}
    assert addon.report["mean_attention_cosine"] > 0.5


def test_progress_bar_shows_speed_and_time_left(tiny_model, capsys):
    fit(tiny_model("llama"), PLANS["two stages"], _windows())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "tokens/s" in shown.err and "48/48" in shown.err


def test_low_rank_terms_are_left_at_their_start_which_changes_nothing(tiny_model):
    model = tiny_model("llama")
    tokens = torch.randint(3, 97, (20, 32), generator=torch.Generator().manual_seed(1))
    depth = [{"method": "csa2", "source": 3, "readers": [4, 5]}]
    plan = Plan.from_dict({"anchors": 2, "window": 4, "depth": depth})
    plain = fit(model, plan, tokens, progress=False)
    made = fit(model, plan.replace(lora={"rank": 2}), tokens, progress=False)
    terms = [term for _, _, term in made.lora.terms()]
    assert len(terms) == 6 and not any(term.b.any() for term in terms)
    assert not any(weight.requires_grad for weight in made.parameters())
    with attach(model, plain):
        expected = model(tokens).logits
    with attach(model, made):
        assert torch.equal(model(tokens).logits, expected)
