"""Cost lies beside quality: bytes that are the same in every run, and times that are measured."""

from __future__ import annotations

import json

import pytest

from kvfold.anatomy import anatomy
from kvfold.errors import EvaluationError
from kvfold.evaluation import cost
from kvfold.evaluation.cost import CostSettings, write_cost
from kvfold.evaluation.memory import memory_at
from kvfold.evaluation.runner import PLAIN
from kvfold.plan import Plan

PLAN = Plan.from_dict(
    {"anchors": 2, "window": 4, "depth": [{"method": "csa2", "source": 3, "readers": [4, 5]}]}
)
SETTINGS = CostSettings(lengths=(64, 256), speed_lengths=(16, 24), decode_tokens=2, repeats=1)


def test_bytes_and_times_of_every_subject_are_written(tiny_model, bare_addon, tmp_path):
    model = tiny_model("llama")
    candidates = {"a": bare_addon(model, PLAN)}
    told = []
    made = write_cost(tmp_path, model, candidates, SETTINGS, on_progress=told.append)
    assert json.loads((tmp_path / "cost.json").read_text()) == made
    assert list(made["subjects"]) == [PLAIN, "a"]
    assert told == ["speed at 16 tokens", "speed at 24 tokens"]
    folded = made["subjects"]["a"]
    expected = memory_at(PLAN, anatomy(model), (64, 256))
    assert [m["stored_bytes"] for m in folded["memory"]] == [m.stored_bytes for m in expected]
    assert folded["addon_bytes"] == expected[0].addon_bytes > 0
    for subject in made["subjects"].values():
        assert [speed["history"] for speed in subject["speed"]] == [16, 24]
        for speed in subject["speed"]:
            assert speed["first_token_seconds"] >= speed["prefill_seconds"] > 0
            assert speed["decode_tokens_per_second"] > 0


def test_what_is_measured_already_is_not_measured_again(
    tiny_model, bare_addon, tmp_path, monkeypatch
):
    model = tiny_model("llama")
    settings = CostSettings(lengths=(64,), speed_lengths=())
    made = write_cost(tmp_path, model, {"a": bare_addon(model, PLAN)}, settings)
    calls = []
    monkeypatch.setattr(cost, "cost_of", lambda *_, **__: calls.append(1) or {"subjects": {}})
    assert write_cost(tmp_path, model, {"a": bare_addon(model, PLAN)}, settings) == made
    assert calls == []
    write_cost(tmp_path, model, {"b": bare_addon(model, PLAN)}, settings)
    assert calls == [1]
    (tmp_path / "cost.json").write_text("[]")
    with pytest.raises(EvaluationError, match=r"cost\.json must be a JSON object"):
        write_cost(tmp_path, model, {}, settings)


def test_what_other_code_measured_is_measured_again(tiny_model, tmp_path, monkeypatch):
    model, settings = tiny_model("llama"), CostSettings(lengths=(64,), speed_lengths=())
    old, new = ({"commit": c, "sources": c * 32} for c in ("aa", "bb"))
    monkeypatch.setattr(cost, "code_state", lambda: old)
    assert write_cost(tmp_path, model, {}, settings)["code"] == old
    monkeypatch.setattr(cost, "code_state", lambda: {**old, "commit": "docs only"})
    assert write_cost(tmp_path, model, {}, settings)["code"] == old
    monkeypatch.setattr(cost, "code_state", lambda: new)
    assert write_cost(tmp_path, model, {}, settings)["code"] == new


def test_what_a_release_measured_that_kept_no_code_is_measured_again(tiny_model, tmp_path):
    model, settings = tiny_model("llama"), CostSettings(lengths=(64,), speed_lengths=())
    made = write_cost(tmp_path, model, {}, settings)
    older = {name: value for name, value in made.items() if name != "code"}
    (tmp_path / "cost.json").write_text(json.dumps(older))
    assert write_cost(tmp_path, model, {}, settings) == made
