"""Decay of linear-attention states against a loop over windows, tokens and heads."""

from __future__ import annotations

import json
import math
from statistics import fmean

import pytest
import torch

from kvfold.anatomy import linear_attention_module
from kvfold.errors import EvaluationError, UnsupportedModelError
from kvfold.fitting.decay import LayerDecay, measure_decay

REPLAYS = (1, 7, 40)


def inputs_of(model, layer, window):
    seen = []
    handle = linear_attention_module(model, layer).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        model(window[None], use_cache=False)
    handle.remove()
    return seen[0][0]


@pytest.fixture
def windows():
    """Six windows of 40 tokens of a vocabulary of 97."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 97, (6, 40), generator=generator)


def by_loop(model, layer, windows, replays):
    """Mean g and mean shares of each head, one position at a time."""
    module = linear_attention_module(model, layer)
    heads = module.num_v_heads
    all_g, shares = [[] for _ in range(heads)], {t: [[] for _ in range(heads)] for t in replays}
    for window in windows:
        a = (inputs_of(model, layer, window) @ module.in_proj_a.weight.T).tolist()
        for head in range(heads):
            pace = math.exp(module.A_log.detach()[head])
            bias = float(module.dt_bias.detach()[head])
            g = [-pace * math.log1p(math.exp(row[head] + bias)) for row in a]
            all_g[head] += g
            for t in replays:
                shares[t][head] += [math.exp(sum(g[end - t : end])) for end in range(t, len(g) + 1)]
    return [fmean(g) for g in all_g], {t: [fmean(s) for s in shares[t]] for t in replays}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_figures_are_those_of_a_loop_over_tokens(tiny_model, windows, name):
    model = tiny_model(name, dtype=torch.float64)
    some = windows[:3]
    report = measure_decay(model, some, REPLAYS, batch=2)
    assert [decay.layer for decay in report.layers] == [0, 1, 2, 4, 5, 6]
    for decay in report.layers:
        log_decay, kept = by_loop(model, decay.layer, some, REPLAYS)
        assert decay.log_decay == pytest.approx(log_decay, rel=1e-6)
        for t in REPLAYS:
            assert decay.kept[t] == pytest.approx(kept[t], rel=1e-6)


def test_batches_do_not_change_the_figures(tiny_model, windows):
    model = tiny_model("qwen3_5")
    one, all_at_once = (measure_decay(model, windows, REPLAYS, batch=b) for b in (1, 6))
    for a, b in zip(one.layers, all_at_once.layers, strict=True):
        assert a.log_decay == pytest.approx(b.log_decay, rel=1e-5)
        assert a.kept[7] == pytest.approx(b.kept[7], rel=1e-4, abs=1e-7)


def test_replays_longer_than_a_window_are_left_out(tiny_model, windows):
    report = measure_decay(tiny_model("qwen3_5"), windows, (40, 8, 41))
    assert report.replays == (8, 40)
    assert (report.windows, report.window) == (6, 40)


def test_shares_fall_with_the_number_of_tokens(tiny_model, windows):
    for decay in measure_decay(tiny_model("qwen3_5"), windows, REPLAYS).layers:
        for head in range(4):
            shares = [decay.kept[t][head] for t in REPLAYS]
            assert 1 > shares[0] > shares[1] >= shares[2] >= 0


def test_the_half_life_follows_from_the_mean_decay():
    decay = LayerDecay(3, (-math.log(2), -math.log(2) / 50, 0.0), {})
    assert decay.half_life == pytest.approx((1.0, 50.0, math.inf))


def test_the_report_is_valid_json_with_every_head(tiny_model, windows):
    model = tiny_model("qwen3_5")
    with torch.no_grad():
        linear_attention_module(model, 1).A_log[2] = -math.inf
    data = json.loads(json.dumps(measure_decay(model, windows, (8,)).to_dict(), allow_nan=False))
    assert [layer["layer"] for layer in data["layers"]] == [0, 1, 2, 4, 5, 6]
    heads = data["layers"][1]["heads"]
    assert len(heads) == 4
    assert heads[2] == {"log_decay": 0.0, "half_life": None, "kept": {"8": 1.0}}
    assert heads[0]["half_life"] == pytest.approx(math.log(2) / -heads[0]["log_decay"])


def test_a_model_that_only_attends_is_refused(tiny_model, windows):
    with pytest.raises(UnsupportedModelError, match="has no linear-attention layers"):
        measure_decay(tiny_model("llama"), windows)


@pytest.mark.parametrize(
    ("ids", "replays"),
    [
        (torch.zeros(0, 8, dtype=torch.int64), (4,)),
        (torch.zeros(8, dtype=torch.int64), (4,)),
        (torch.zeros(1, 8, dtype=torch.int64), (4, 0)),
    ],
)
def test_nothing_to_measure_is_an_error(tiny_model, ids, replays):
    with pytest.raises(EvaluationError, match=r"windows of shape .* got"):
        measure_decay(tiny_model("qwen3_5"), ids, replays)
