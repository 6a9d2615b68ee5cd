"""Refining brings layers nearer to their exact history, and never moves them away from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.errors import CorpusError, FitError
from kvfold.fitting import refine as refine_module
from kvfold.fitting.descent import AttentionDescent
from kvfold.fitting.fit import fit
from kvfold.fitting.frozen import frozen
from kvfold.fitting.gates import GateSettings
from kvfold.fitting.mixture import Mixture, MixturePart
from kvfold.fitting.parts import PARTS, parameters_of, units
from kvfold.fitting.refine import RefineSettings, refine
from kvfold.fitting.weight_scales import weight_groups
from kvfold.methods import build_pipelines
from kvfold.methods.turboquant import TurboQuant
from kvfold.plan import Plan
from kvfold.runtime.capture import capture
from kvfold.runtime.reading import choose_readings

SEQ = 64
SETTINGS = RefineSettings(steps=48, moves=4, rows=4, queries=48, look_every=8, patience=6)
DIFFERENCES = {"llama": (1e-5, 1e-5), "qwen3_5": (1e-3, 2e-2)}
"""Step and relative tolerance of central differences in float64. Norms of qwen3_5 round to
float32, which leaves 1e-7 of the loss: a step must be long and its curvature shows.
"""


def _tokens(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (rows, SEQ), generator=torch.Generator().manual_seed(seed))


def _mixture() -> Mixture:
    return Mixture([MixturePart("random", _tokens(64), 1.0)], seed=0)


def _plan(model: Any, name: str, **keys: Any) -> Plan:
    layers = list(anatomy(model).foldable_layers)
    first, rest = layers[0], layers[1:]
    entries: dict[str, dict[str, Any]] = {
        "ced": {"depth": [{"method": "ced", "split": first, "layers": layers}]},
        "joint": {"depth": [_csa2(first, rest, residual_hidden=8)]},
        "separate": {"depth": [_csa2(first, rest, form="separate", residual_hidden=8)]},
        "ced into csa2": {
            "depth": [{"method": "ced", "split": first, "layers": [first]}, _csa2(first, rest)]
        },
        "latent": {"depth": [{"method": "latent", "layers": layers, "rank": 12}]},
        "pool": {"sequence": [{"method": "pool", "layers": layers, "gate": "head"}]},
    }
    return Plan.from_dict({"anchors": 2, "window": 4, **entries[name], **keys})


def _csa2(source: int, readers: list[int], **keys: Any) -> dict[str, Any]:
    return {"method": "csa2", "source": source, "readers": readers, **keys}


def _fitted(model: Any, plan: Plan) -> Any:
    gates = GateSettings(steps=0)
    return fit(model, plan, _tokens(16, seed=5), gates=gates, progress=False)


def _refine(model: Any, addon: Any, settings: RefineSettings = SETTINGS, **options: Any) -> Any:
    held_out = _tokens(6, seed=2)
    return refine(model, addon, _mixture(), held_out, settings, progress=False, **options)


def _descent(model: Any, plan: Plan) -> AttentionDescent:
    """A descent over weights drawn at random."""
    shape = anatomy(model)
    pipelines = list(build_pipelines(plan, shape).to(torch.float64).requires_grad_(False))
    generator = torch.Generator().manual_seed(3)
    for pipeline in pipelines:
        for weight in parameters_of(pipeline, PARTS).values():
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.data.copy_(drawn / max(1, weight.shape[-1]) ** 0.5)
            weight.requires_grad_(True)
    readings = choose_readings(plan, pipelines, shape)
    groups = weight_groups(pipelines, PARTS)
    return AttentionDescent(model, shape, plan, pipelines, SEQ, SETTINGS, groups, readings)


def _loss(descent: AttentionDescent, exact: Any) -> torch.Tensor:
    errors = [descent.drawn_errors(pipeline, exact, {}) for pipeline in descent.pipelines]
    return torch.stack([error for layers in errors for error in layers.values()]).sum()


class _RememberedRounding:
    """Rounding that adds the same error at every call, as straight-through gradients take it."""

    def __init__(self) -> None:
        self.real, self.errors, self.call = TurboQuant.rounded, [], 0

    def rounded(self, codec: TurboQuant, x: torch.Tensor) -> torch.Tensor:
        if self.call == len(self.errors):
            self.errors.append((self.real(codec, x) - x).detach())
        self.call += 1
        return x + self.errors[self.call - 1]


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("name", ["ced", "joint", "separate", "ced into csa2", "latent", "pool"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_gradients_of_every_method_are_those_of_finite_differences(
    tiny_model: Any, arch: str, name: str, bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(arch, dtype=torch.float64)
    layers = list(anatomy(model).foldable_layers)
    quantised = [{"method": "turboquant", "layers": layers}] if bits else []
    descent = _descent(model, _plan(model, name, bits=quantised))
    step, close = DIFFERENCES[arch]
    rounding = _RememberedRounding()
    monkeypatch.setattr(TurboQuant, "rounded", lambda codec, x: rounding.rounded(codec, x))
    with frozen(model):
        exact = capture(model, descent.shape, descent.sources, _tokens(1))
        with torch.enable_grad():
            _loss(descent, exact).backward()
        assert bool(rounding.errors) == bits
        generator = torch.Generator().manual_seed(4)
        for pipeline in descent.pipelines:
            for key, weight in parameters_of(pipeline, PARTS).items():
                if weight.grad is None:
                    continue
                way = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                losses = []
                for sign in (1, -1):
                    weight.data.add_(way, alpha=sign * step)
                    rounding.call = 0
                    losses.append(float(_loss(descent, exact)))
                    weight.data.sub_(way, alpha=sign * step)
                slope = (losses[0] - losses[1]) / (2 * step)
                expected = float((weight.grad * way).sum())
                assert slope == pytest.approx(expected, rel=close, abs=close / 100), key


@pytest.mark.parametrize("name", ["ced", "joint", "separate", "ced into csa2", "latent", "pool"])
def test_every_weight_that_layers_read_gets_a_gradient(tiny_model: Any, name: str) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    descent = _descent(model, _plan(model, name))
    with frozen(model):
        exact = capture(model, descent.shape, descent.sources, _tokens(1))
        with torch.enable_grad():
            _loss(descent, exact).backward()
    for pipeline in descent.pipelines:
        for key, weight in parameters_of(pipeline, PARTS).items():
            assert weight.grad is not None and weight.grad.any(), key
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("name", ["ced", "joint", "latent", "pool"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_the_held_out_error_falls(tiny_model: Any, arch: str, name: str, bits: bool) -> None:
    model = tiny_model(arch)
    layers = list(anatomy(model).foldable_layers)
    quantised = [{"method": "turboquant", "layers": layers}] if bits else []
    addon = _fitted(model, _plan(model, name, bits=quantised))
    lines: list[dict[str, Any]] = []
    report = _refine(model, addon, log=lines.append)
    error = report["held_out_error"]
    assert error["after"] < 0.99 * error["before"]
    assert lines[0]["held_out_error"] == pytest.approx(error["before"], abs=1e-6)
    assert [line["step"] for line in lines] == list(range(0, report["steps"] + 1, 8))
    best = min(line["best_held_out_error"] for line in lines)
    assert best == pytest.approx(error["after"], abs=1e-6)


def test_the_base_model_stays_as_it_was(tiny_model: Any) -> None:
    model = tiny_model("llama")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    addon = _fitted(model, _plan(model, "joint"))
    _refine(model, addon)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.requires_grad and weight.grad is None
    for weight in addon.parameters():
        assert not weight.requires_grad and weight.grad is None


def test_what_is_exact_stays_as_it_is(tiny_model: Any) -> None:
    """A code of full rank gives everything back: there is nothing to win."""
    model = tiny_model("llama", dtype=torch.float64)
    layers = list(anatomy(model).foldable_layers)[-2:]
    width = 4 * anatomy(model).layers[layers[0]].kv_width
    entry = {"method": "latent", "layers": layers, "rank": width}
    plan = Plan.from_dict({"anchors": 2, "window": 4, "depth": [entry]})
    addon = fit(model, plan, _tokens(16, seed=5), key_dispersion=0, progress=False)
    before = {name: weight.clone() for name, weight in addon.pipelines.named_parameters()}
    report = _refine(model, addon)
    assert report["held_out_error"] == {"before": 0.0, "after": 0.0}
    assert report["steps"] == SETTINGS.patience * SETTINGS.look_every
    for name, weight in addon.pipelines.named_parameters():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize(
    ("parts", "moved"),
    [
        (("maps",), "depth"),
        (("gates",), "sequence"),
        (("biases",), "sequence.mass"),
        (("residual",), "mlp"),
    ],
)
def test_only_the_parts_that_were_named_move(tiny_model: Any, parts: Any, moved: str) -> None:
    model = tiny_model("llama")
    layers = list(anatomy(model).foldable_layers)
    pool = [{"method": "pool", "layers": layers, "gate": "head"}]
    name = "joint" if moved in ("depth", "mlp") else "pool"
    addon = _fitted(model, _plan(model, name, sequence=pool))
    before = {name: weight.clone() for name, weight in addon.pipelines.named_parameters()}
    _refine(model, addon, replace(SETTINGS, steps=24, look_every=24, parts=parts))
    changed = {
        name
        for name, weight in addon.pipelines.named_parameters()
        if not torch.equal(weight, before[name])
    }
    named = {name for pipe in addon.pipelines for name in parameters_of(pipe, parts)}
    assert changed
    assert {name.partition(".")[2] for name in changed} <= named
    assert all(moved in name for name in changed)


@pytest.mark.parametrize("name", ["joint", "pool"])
@pytest.mark.parametrize("stop", [5, 19])
def test_a_resumed_run_ends_bit_equal(
    tiny_model: Any, tmp_path: Any, name: str, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    plan, checkpoint = _plan(model, name), tmp_path / "job"
    whole, broken = _fitted(model, plan), _fitted(model, plan)
    again = {name: weight.clone() for name, weight in broken.pipelines.state_dict().items()}
    settings = replace(SETTINGS, steps=24)
    expected = _refine(model, whole, settings)
    real, taken = AttentionDescent.step, []

    class Stop(Exception):  # noqa: N818
        pass

    def stopping(self: Any, *args: Any) -> None:
        if len(taken) == stop:
            raise Stop
        taken.append(1)
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(AttentionDescent, "step", stopping)
        with pytest.raises(Stop):
            _refine(model, broken, settings, checkpoint=checkpoint, checkpoint_every=2)
    broken.pipelines.load_state_dict(again)
    found = _refine(model, broken, settings, checkpoint=checkpoint, checkpoint_every=2)
    assert not checkpoint.exists()
    for key, weight in broken.pipelines.named_parameters():
        assert torch.equal(weight, whole.pipelines.get_parameter(key)), key
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}


def test_a_checkpoint_of_another_add_on_is_refused(
    tiny_model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoint = tiny_model("llama"), tmp_path / "job"
    addon = _fitted(model, _plan(model, "ced"))
    monkeypatch.setattr(refine_module.Path, "unlink", lambda *_, **__: None)
    _refine(model, addon, checkpoint=checkpoint, checkpoint_every=8)
    assert checkpoint.exists()
    with pytest.raises(FitError, match="must belong to this fit"):
        _refine(model, addon, checkpoint=checkpoint, checkpoint_every=8)


def test_an_interrupted_run_leaves_the_best_weights_so_far(tiny_model: Any) -> None:
    model = tiny_model("llama")
    addon = _fitted(model, _plan(model, "ced"))
    before = [weight.clone() for weight in addon.parameters()]

    def interrupt(line: dict[str, Any]) -> None:
        if line["step"] > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _refine(model, addon, log=interrupt)
    assert not any(weight.requires_grad for weight in addon.parameters())
    assert not all(torch.equal(a, b) for a, b in zip(before, addon.parameters(), strict=True))


def test_weights_come_back_in_the_models_dtype(tiny_model: Any) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    addon = _fitted(model, _plan(model, "joint"))
    report = _refine(model, addon)
    assert {weight.dtype for weight in addon.parameters()} == {torch.bfloat16}
    assert report["held_out_error"]["after"] < report["held_out_error"]["before"]


def test_pipelines_that_share_maps_are_one_unit(tiny_model: Any) -> None:
    model = tiny_model("llama")
    shared = {"method": "ced", "split": 1, "layers": [1, 4]}
    plan = Plan.from_dict({"window": 4, "depth": [shared, _csa2(1, [2]), _csa2(4, [5])]})
    pipelines = list(build_pipelines(plan, anatomy(model)))
    assert [len(unit) for unit in units(pipelines, PARTS)] == [2]


def test_a_plan_without_weights_is_left_alone(tiny_model: Any) -> None:
    model = tiny_model("llama")
    addon = _fitted(model, Plan.from_dict({"window": 4}))
    assert _refine(model, addon) == {}


@pytest.mark.parametrize("seq", [SEQ, 6])
def test_rows_without_a_history_are_refused(tiny_model: Any, seq: int) -> None:
    model = tiny_model("llama")
    addon = _fitted(model, _plan(model, "ced"))
    short = _tokens(2)[:, : 6 if seq == SEQ else SEQ]
    mixture = Mixture([MixturePart("short", _tokens(2)[:, :seq], 1.0)], seed=0)
    with pytest.raises(CorpusError, match="have none beyond"):
        refine(model, addon, mixture, short, SETTINGS, progress=False)


@pytest.mark.parametrize(
    "wrong", [{"parts": ("heads",)}, {"parts": ()}, {"rows": 0}, {"patience": 0}]
)
def test_settings_that_can_not_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FitError, match="must be"):
        RefineSettings(**wrong)
