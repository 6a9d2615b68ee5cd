"""CED on plain tensors."""

from __future__ import annotations

import pytest
import torch

from kvfold.methods import CedFold, CedMaps, Source


def ced(layers, *, bias=True, normalize=True, hidden=24, kv_heads=2, head_dim=4):
    maps = CedMaps(2, layers, hidden, kv_heads, head_dim, bias=bias, normalize=normalize)
    fold = CedFold(maps)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in fold.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return fold


def hidden_state():
    hidden = 3 * torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))
    return {Source("hidden", 2): hidden}


@pytest.mark.parametrize("layers", [(3,), (3, 5), (3, 4, 5)])
def test_decoding_gives_the_projection_whatever_is_stored(layers):
    fold = ced(layers)
    activations = hidden_state()
    code = fold.encode(activations)
    assert code.shape == (2, 5, fold.code_width)
    assert fold.code_width == min(24, 16 * len(layers))
    features = fold.maps.features(activations)
    for layer in layers:
        keys, values = fold.decode(layer, code)
        expected_keys, expected_values = fold.maps.project(layer, features)
        torch.testing.assert_close(keys, expected_keys)
        torch.testing.assert_close(values, expected_values)


def test_a_single_layer_stores_its_projected_keys_and_values():
    fold = ced((3,))
    assert fold.holds(3)
    assert fold.affine_keys(3) is None


def test_affine_maps_equal_decoding_where_the_hidden_state_is_stored():
    fold = ced((3, 4, 5))
    code = fold.encode(hidden_state())
    for layer in fold.layers:
        keys, values = fold.decode(layer, code)
        for map_, expected in (
            (fold.affine_keys(layer), keys),
            (fold.affine_values(layer), values),
        ):
            torch.testing.assert_close(code @ map_.weight.T + map_.bias, expected)


def test_normalising_makes_the_scale_of_the_hidden_state_irrelevant():
    activations = hidden_state()
    larger = {source: 10 * x for source, x in activations.items()}
    for normalize in (True, False):
        fold = ced((3,), normalize=normalize)
        same = torch.allclose(fold.encode(activations), fold.encode(larger), atol=1e-4)
        assert same == normalize


def test_the_cards_projector_has_its_parameter_count():
    maps = CedMaps(16, (19,), 2560, 4, 256, bias=False, normalize=False)
    assert CedFold(maps).parameter_count() == 5_242_880


def test_fitting_problems_cover_every_matrix_once():
    fold = ced((3, 4))
    problems = fold.problems()
    assert {p.target for p in problems} == {
        Source(kind, layer) for kind in ("keys", "values") for layer in (3, 4)
    }
    assert len({id(p.linear) for p in problems}) == 4
    assert len({p.features_key for p in problems}) == 1


def test_weights_start_at_zero():
    fold = CedFold(CedMaps(2, (3,), 24, 2, 4))
    assert all(not parameter.any() for parameter in fold.parameters())
