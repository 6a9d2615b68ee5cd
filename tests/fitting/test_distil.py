"""Distilling brings the folded model nearer to the plain one, and nothing else moves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.errors import AddOnError, CorpusError, FitError
from kvfold.fitting.checkpoint import Checkpoint
from kvfold.fitting.distil import Distiller, distil
from kvfold.fitting.distil_settings import DistilSettings
from kvfold.fitting.fit import fit
from kvfold.fitting.gates import GateSettings
from kvfold.fitting.mixture import Mixture, MixturePart
from kvfold.plan import Plan
from kvfold.store.addon import AddOn

SETTINGS = DistilSettings(steps=24, rows=2, learning_rate=0.05, look_every=6)


def _tokens(rows: int, seq: int = 64, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (rows, seq), generator=torch.Generator().manual_seed(seed))


def _mixture() -> Mixture:
    return Mixture([MixturePart("text", _tokens(12), 1.0)], seed=0)


def _entries(name: str, layers: list[int]) -> dict[str, Any]:
    pool = [{"method": "pool", "layers": layers, "gate": "head"}]
    csa2 = {"method": "csa2", "source": layers[0], "readers": layers[1:]}
    ced = {"method": "ced", "split": layers[0], "layers": layers}
    return {
        "ced": {"depth": [ced]},
        "csa2": {"depth": [csa2]},
        "csa2-residual": {"depth": [{**csa2, "residual_hidden": 16}]},
        "pool": {"sequence": pool},
        "latent+pool+bits": {
            "depth": [{"method": "latent", "layers": layers, "rank": 20}],
            "sequence": pool,
            "bits": [{"method": "turboquant", "layers": layers}],
        },
        "lora": {"depth": [ced], "lora": {"rank": 4}},
    }[name]


def _addon(model: Any, name: str = "csa2", *, ridge: float = 1e-2, **keys: Any) -> AddOn:
    layers = list(anatomy(model).foldable_layers)[-3:]
    plan = Plan.from_dict({"anchors": 2, "window": 4, **_entries(name, layers), **keys})
    untrained = GateSettings(steps=0)
    return fit(model, plan, _tokens(12), ridge=ridge, gates=untrained, progress=False)


def _run(model: Any, addon: AddOn, settings: DistilSettings = SETTINGS, **more: Any) -> Any:
    held_out = _tokens(4, seed=2)
    return distil(model, addon, _mixture(), held_out, settings, progress=False, **more)


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "phi3"])
@pytest.mark.parametrize(
    "name", ["ced", "csa2", "csa2-residual", "pool", "latent+pool+bits", "lora"]
)
def test_held_out_kl_falls(tiny_model: Any, arch: str, name: str) -> None:
    model = tiny_model(arch)
    careful = DistilSettings(steps=40, learning_rate=0.01, look_every=10)
    report = _run(model, _addon(model, name, ridge=1.0), careful)
    assert report["held_out_kl"]["best"] < 0.99 * report["held_out_kl"]["start"]


def test_what_is_kept_is_the_best_look(tiny_model: Any) -> None:
    """A rate that ruins everything leaves the add-on as it was."""
    model = tiny_model("llama")
    addon = _addon(model)
    before = [p.clone() for p in addon.parameters()]
    report = _run(model, addon, DistilSettings(steps=6, learning_rate=50.0, look_every=2))
    assert report["best_step"] == 0
    assert report["held_out_kl"]["best"] == report["held_out_kl"]["start"]
    assert all(map(torch.equal, addon.parameters(), before))


def test_nothing_of_the_base_moves_or_gets_a_gradient(tiny_model: Any) -> None:
    model = tiny_model("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    addon = _addon(model, "lora")
    _run(model, addon)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert parameter.requires_grad
    assert not any(p.requires_grad for p in addon.parameters())
    assert not any("forward" in vars(m) or m._forward_hooks for m in model.modules())


def test_weights_come_back_in_their_own_dtype(tiny_model: Any) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    addon = _addon(model)
    report = _run(model, addon)
    assert {p.dtype for p in addon.parameters()} == {torch.bfloat16}
    assert report["held_out_kl"]["best"] < report["held_out_kl"]["start"]


@pytest.mark.parametrize("name", ["csa2", "latent+pool+bits", "lora"])
def test_a_killed_run_goes_on_bit_by_bit(tiny_model: Any, tmp_path: Path, name: str) -> None:
    model = tiny_model("llama")
    settings = DistilSettings(
        steps=13, look_every=4, windows=(2, 8), rows=2, rows_at_once=1, logits_share=0.5
    )
    whole, killed = _addon(model, name), _addon(model, name)
    expected = _run(model, whole, settings)
    checkpoint, last = tmp_path / "distil", random.Random(name).randrange(3, 12)

    def killing(line: dict[str, Any]) -> None:
        if line["step"] == last and "loss" in line:
            raise KeyboardInterrupt

    start = [p.clone() for p in killed.parameters()]
    with pytest.raises(KeyboardInterrupt):
        _run(model, killed, settings, checkpoint=checkpoint, checkpoint_every=2, log=killing)
    with torch.no_grad():
        for parameter, value in zip(killed.parameters(), start, strict=True):
            parameter.copy_(value)
    found = _run(model, killed, settings, checkpoint=checkpoint, checkpoint_every=2)
    assert not checkpoint.exists()
    assert found["looks"] == expected["looks"]
    assert all(map(torch.equal, killed.parameters(), whole.parameters()))


def test_a_checkpoint_of_other_settings_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    model, checkpoint = tiny_model("llama"), tmp_path / "distil"
    addon = _addon(model)
    run = Distiller(model, addon, _mixture(), _tokens(4), SETTINGS)
    Checkpoint(checkpoint, run.digest, 1).save(run.state_dict())
    with pytest.raises(FitError, match="must belong to this fit"):
        _run(model, addon, DistilSettings(steps=5), checkpoint=checkpoint)
    assert checkpoint.exists()


def test_rows_in_parts_give_the_gradients_of_all_at_once(tiny_model: Any) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    found = []
    for at_once in (0, 1):
        addon = _addon(model)
        settings = DistilSettings(steps=2, rows=3, rows_at_once=at_once, hidden_weight=0.0)
        _run(model, addon, settings)
        found.append([p.clone() for p in addon.parameters()])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-6, atol=1e-8)


def test_it_ends_when_patience_runs_out(tiny_model: Any) -> None:
    model = tiny_model("llama")
    settings = DistilSettings(steps=40, learning_rate=50.0, look_every=2, patience=2)
    assert _run(model, _addon(model), settings)["steps"] == 4


def test_the_log_has_a_line_for_every_step_and_look(tiny_model: Any) -> None:
    lines: list[dict[str, Any]] = []
    model = tiny_model("llama")
    _run(model, _addon(model), DistilSettings(steps=5, look_every=2), log=lines.append)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "held_out_kl" in line] == [0, 2, 4, 5]


def test_rows_without_a_history_are_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with pytest.raises(CorpusError, match="windows of 80 leave none"):
        _run(model, _addon(model, window=80))
    with pytest.raises(CorpusError, match="windows of 64, 70 leave none"):
        _run(model, _addon(model), DistilSettings(windows=(8, 64, 70)))


def test_an_add_on_without_weights_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    plan = Plan.from_dict({"window": 4, "depth": [{"method": "drop", "layers": [0]}]})
    with pytest.raises(FitError, match="must be something to distil"):
        _run(model, AddOn.untrained(model, plan))


def test_another_base_model_is_refused(tiny_model: Any) -> None:
    addon = _addon(tiny_model("llama"))
    with pytest.raises(AddOnError):
        _run(tiny_model("qwen3"), addon)


def test_steps_draw_from_windows_and_groups(tiny_model: Any) -> None:
    """So that one add-on serves several budgets; the plan's own group is the largest."""
    model = tiny_model("llama")
    settings = DistilSettings(steps=12, learning_rate=0.01, windows=(8,), groups=(2,), look_every=4)
    addon = _addon(model, "pool")
    report = _run(model, addon, settings)
    assert report["held_out_kl"]["best"] < report["held_out_kl"]["start"]
    assert report["groups"] == [2]
    assert report["windows"] == [4, 8]
    assert addon.plan.sequence[0].group == 4
    for groups in ((8,), (1,)):
        with pytest.raises(FitError, match="from 2 to the plan's own group"):
            _run(model, _addon(model, "pool"), DistilSettings(groups=groups))
    with pytest.raises(FitError, match="of which it has none"):
        _run(model, _addon(model), DistilSettings(groups=(2,)))
