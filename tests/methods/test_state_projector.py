"""The state projector on plain tensors, and fitted on a tiny hybrid."""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.anatomy import anatomy, linear_attention_module, linear_inputs
from kvfold.fitting.tasks import RegressionTask, target_of
from kvfold.methods import Source
from kvfold.methods.maps import rms_normalize
from kvfold.methods.state_projector import KEPT_SHARE, StateProjector
from kvfold.runtime.capture import capture

LAYERS = (4, 5, 6)


def projector(hidden=32, v_heads=4, seed=None):
    made = StateProjector(4, LAYERS, hidden, v_heads)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def random(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_maps_start_at_zero_and_are_named_by_their_layer():
    made = projector()
    assert all(not parameter.any() for parameter in made.parameters())
    names = set(made.state_dict())
    assert {f"maps.{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")} == names


def test_the_map_reads_the_normalised_hidden_state():
    made = projector(seed=0)
    hidden = 5 * random(2, 7, 32)
    features = made.features({Source("hidden", 4): hidden})
    linear = made.maps["5"]
    expected = rms_normalize(hidden) @ linear.weight.T + linear.bias
    torch.testing.assert_close(made.project(5, features), expected)


def test_rows_of_an_input_projection_fold_into_the_map():
    made = projector(seed=0)
    rows, features = random(9, 32), random(2, 7, 32, seed=2)
    folded = made.fold_rows(6, rows)
    assert folded.weight.shape == (9, 32)
    expected = made.project(6, features) @ rows.T
    torch.testing.assert_close(
        features @ folded.weight.T + folded.bias, expected, rtol=1e-5, atol=1e-4
    )


def test_folding_half_precision_rows_rounds_only_the_result():
    made = projector(seed=0).to(torch.bfloat16)
    rows = random(9, 32).to(torch.bfloat16)
    exact = rows.double() @ made.maps["6"].weight.double()
    folded = made.fold_rows(6, rows)
    assert folded.weight.dtype == torch.bfloat16
    torch.testing.assert_close(folded.weight.double(), exact, rtol=2**-8, atol=1e-6)


def test_before_anything_is_measured_every_head_is_chosen():
    assert projector().chosen_heads(4, replay=10_000) == (0, 1, 2, 3)


def test_heads_are_chosen_by_the_share_scaled_to_the_replay():
    made = projector()
    made.set_kept(256, dict.fromkeys(LAYERS, (0.5, 0.02, 2e-3, 1e-12)))
    assert made.chosen_heads(5, replay=256) == (0, 1, 2)
    assert made.chosen_heads(5, replay=512) == (0,)  # 0.02 ** 2 is 4e-4
    assert made.chosen_heads(5, replay=64) == (0, 1, 2)  # 1e-12 ** 0.25 is 1e-3, not above
    assert made.chosen_heads(5, replay=32) == (0, 1, 2, 3)
    assert made.chosen_heads(5, replay=256, threshold=0.1) == (0,)
    assert made.chosen_heads(5, replay=256, threshold=0.5) == ()


def test_the_default_threshold_is_below_the_rounding_of_bfloat16():
    rounding = torch.finfo(torch.bfloat16).eps / 4
    assert rounding > KEPT_SHARE


def test_a_change_of_dtype_leaves_what_was_measured():
    made = projector()
    made.set_kept(1023, dict.fromkeys(LAYERS, (1e-30, 1 / 3, 0.0, 1.0)))
    made.to(torch.float16)
    assert (made.measured_replay, made.kept[4]) == (1023, (1e-30, 1 / 3, 0.0, 1.0))
    assert made.chosen_heads(4, replay=64) == (0, 1, 3)


@pytest.mark.parametrize(
    ("replay", "shares"),
    [
        (0, (1.0,) * 4),
        (-5, (1.0,) * 4),
        (2.5, (1.0,) * 4),
        (8, (1.0,) * 3),
        (8, (1.0, 1.0, 1.0, 1.5)),
        (8, (1.0, 1.0, 1.0, -0.1)),
        (8, (1.0, 1.0, 1.0, math.nan)),
    ],
)
def test_shares_that_cannot_be_are_refused(replay, shares):
    made = projector()
    with pytest.raises(ValueError, match="share from 0 to 1 for each of 4 heads"):
        made.set_kept(replay, dict.fromkeys(LAYERS, shares))
    assert made.measured_replay == 1


def test_problems_share_their_features_and_aim_at_the_layers_inputs():
    problems = projector().problems()
    assert [problem.target for problem in problems] == [Source("inputs", n) for n in LAYERS]
    assert {problem.features_key for problem in problems} == {"state projector H_4"}
    assert all(problem.stage == 0 for problem in problems)


def fitted(model, dispersion=0.0):
    shape = anatomy(model)
    made = projector().double()
    task = RegressionTask(list(made.problems()), shape, torch.device("cpu"))
    ids = torch.randint(3, 97, (16, 24), generator=torch.Generator().manual_seed(0))
    activations = capture(model, shape, task.sources, ids)
    task.add(activations)
    task.solve(1e-6, dispersion)
    return made, activations


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_fit_aims_at_a_linear_layers_inputs_as_they_are(tiny_model, name):
    model = tiny_model(name, dtype=torch.float64)
    made, activations = fitted(model)
    for layer in LAYERS:
        source = Source("inputs", layer)
        assert target_of(anatomy(model), source, activations) is activations[source]
        predicted = made.project(layer, made.features(activations))
        error = (predicted - activations[source]).pow(2).sum()
        spread = (activations[source] - activations[source].mean((0, 1))).pow(2).sum()
        # The first layer behind H_4 reads it through a norm alone; later ones through layers more.
        assert error < (1e-4 if layer == LAYERS[0] else 0.9) * spread


def test_a_stretch_of_keys_does_not_touch_the_maps(tiny_model):
    model = tiny_model("qwen3_5", dtype=torch.float64)
    plain, stretched = fitted(model)[0], fitted(model, dispersion=1.0)[0]
    for one, other in zip(plain.parameters(), stretched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_one_map_of_the_input_equals_a_map_to_each_projection(tiny_model):
    """Least squares commutes with linear maps."""
    model = tiny_model("qwen3_5", dtype=torch.float64)
    made, activations = fitted(model)
    layer = LAYERS[1]
    rows = linear_inputs(linear_attention_module(model, layer)).qkv_weight.detach()
    features = made.features(activations).flatten(0, 1)
    target = activations[Source("inputs", layer)].flatten(0, 1) @ rows.T
    design = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
    direct = design @ torch.linalg.lstsq(design, target).solution
    folded = made.fold_rows(layer, rows)
    through = features @ folded.weight.T + folded.bias
    assert (through - direct).norm() < 1e-4 * direct.norm()
