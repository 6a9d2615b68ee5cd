"""Gates learn to give a layer what its exact history gives, and nothing else moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.errors import CorpusError, FitError, PlanError
from kvfold.fitting.fit import fit
from kvfold.fitting.gates import GateSettings
from kvfold.fitting.together import fit_together
from kvfold.plan import Plan

SETTINGS = GateSettings(steps=16, moves=2, queries=24)


def _plan(model: Any, *, latent: bool = False, **pool: Any) -> Plan:
    layers = list(anatomy(model).foldable_layers)
    depth = [{"method": "latent", "layers": layers, "rank": 16}] if latent else []
    sequence = [{"method": "pool", "layers": layers, **pool}]
    return Plan.from_dict({"window": 8, "depth": depth, "sequence": sequence})


def _tokens(rows: int = 4, seq: int = 96) -> torch.Tensor:
    return torch.randint(3, 97, (rows, seq), generator=torch.Generator().manual_seed(1))


def _mean(errors: dict[str, float]) -> float:
    return sum(errors.values()) / len(errors)


def _fit(model: Any, plan: Plan, **options: Any) -> Any:
    return fit(model, plan, _tokens(), progress=False, **{"gates": SETTINGS, **options})


@pytest.mark.parametrize("gate", ["token", "head", "channel"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "phi3"])
def test_training_brings_a_layer_nearer_to_its_exact_history(
    tiny_model: Any, arch: str, gate: str
) -> None:
    """On text that was not trained on, against equal weights."""
    model = tiny_model(arch)
    held_out = _tokens(rows=6)[4:]
    plain, trained = (
        _fit(model, _plan(model, gate=gate), held_out=held_out, gates=settings).report["layers"]
        for settings in (GateSettings(steps=0), GateSettings(steps=24, moves=2, queries=24))
    )
    errors = [
        _mean({n: r["attention_error"] for n, r in made.items()}) for made in (plain, trained)
    ]
    assert errors[1] < errors[0]
    cosines = [
        _mean({n: r["attention_cosine"] for n, r in made.items()}) for made in (plain, trained)
    ]
    assert cosines[1] > cosines[0]


def test_a_fit_leaves_the_model_and_the_depth_maps_as_they_are(tiny_model: Any) -> None:
    model = tiny_model("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    plan = _plan(model, latent=True, gate="head")
    trained = _fit(model, plan)
    untrained = _fit(model, plan, gates=GateSettings(steps=0))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad
        assert parameter.grad is None
    for name, parameter in trained.pipelines.named_parameters():
        assert parameter.grad is None
        assert not parameter.requires_grad
        same = torch.equal(parameter, untrained.pipelines.get_parameter(name))
        assert same == ("sequence" not in name)


def test_an_interrupted_training_goes_on_where_it_was(tiny_model: Any, tmp_path: Any) -> None:
    model = tiny_model("llama")
    plan, checkpoint = _plan(model, latent=True, gate="channel", overlap=True), tmp_path / "job"
    whole = _fit(model, plan)

    class Stop(Exception):  # noqa: N818
        pass

    from kvfold.fitting import gates

    real, steps = gates.GateTrainer.step, []

    def stopping(self: Any, *args: Any) -> None:
        if len(steps) == 9:
            raise Stop
        steps.append(1)
        real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates.GateTrainer, "step", stopping)
        with pytest.raises(Stop):
            _fit(model, plan, checkpoint=checkpoint, checkpoint_every=4)
    assert checkpoint.exists()
    resumed = _fit(model, plan, checkpoint=checkpoint, checkpoint_every=4)
    assert not checkpoint.exists()
    for name, parameter in resumed.pipelines.named_parameters():
        torch.testing.assert_close(parameter, whole.pipelines.get_parameter(name))
    assert resumed.report["gates"]["error"] == whole.report["gates"]["error"]


def test_plans_trained_together_are_those_trained_alone(tiny_model: Any) -> None:
    model = tiny_model("qwen3")
    plans = {"head": _plan(model, gate="head"), "token": _plan(model, gate="token")}
    plans["bits"] = plans["head"].replace(
        bits=[{"method": "turboquant", "layers": list(anatomy(model).foldable_layers)}]
    )
    made = fit_together(model, plans, _tokens(), gates=SETTINGS, progress=False)
    for name, plan in plans.items():
        alone = _fit(model, plan)
        for key, parameter in made[name].pipelines.named_parameters():
            torch.testing.assert_close(parameter, alone.pipelines.get_parameter(key))


def test_the_bias_starts_where_it_fits_better(tiny_model: Any) -> None:
    """At 0 or at log r, before any step of the optimiser."""
    model = tiny_model("llama")
    settings = GateSettings(steps=1, moves=1, queries=24, learning_rate=1e-9)
    addon = _fit(model, _plan(model, gate="head"), gates=settings)
    starts = {
        round(float(bias), 4)
        for pipeline in addon.pipelines
        for values in pipeline.sequence.mass.values()
        for bias in values
    }
    assert starts <= {0.0, 1.3863}


def test_rows_without_a_history_are_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with pytest.raises(CorpusError, match="at least 1024 tokens"):
        fit(model, _plan(model), _tokens(seq=14), progress=False, gates=SETTINGS)


@pytest.mark.parametrize("wrong", [{"moves": 0}, {"queries": 0}, {"steps": -1}])
@pytest.mark.parametrize("rate", [None, 0.0, float("nan")])
def test_settings_that_can_not_be_are_refused(wrong: dict[str, int], rate: float | None) -> None:
    with pytest.raises(FitError, match="must be"):
        GateSettings(**(wrong if rate is None else {"learning_rate": rate}))


def test_a_training_window_below_the_group_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with pytest.raises(PlanError, match="needs a window"):
        _fit(model, _plan(model), gates=GateSettings(windows=(2,)))
