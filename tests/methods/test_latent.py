"""Latent codes on plain tensors."""

from __future__ import annotations

import pytest
import torch

from kvfold.methods import LatentFold, Source, unit_rms_heads

WIDTH, HEAD_DIM, LAYERS = 8, 4, (1, 2, 4)


def latent(**settings):
    settings = {"rank": 6, **settings}
    rank = settings.pop("rank")
    fold = LatentFold(LAYERS, WIDTH, HEAD_DIM, rank, **settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in fold.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return fold


def activations(fold, hidden=12):
    generator = torch.Generator().manual_seed(1)
    return {
        source: torch.randn(2, 5, hidden if source.kind == "hidden" else WIDTH, generator=generator)
        for source in fold.inputs
    }


SETTINGS = [
    {},
    {"unit_keys": True},
    {"value_rank": 3},
    {"split": 1, "hidden_size": 12},
    {"split": 1, "hidden_size": 12, "value_rank": 3},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_codes_and_layers_have_their_widths(settings):
    fold = latent(**settings)
    code = fold.encode(activations(fold))
    assert code.shape == (2, 5, 6 + settings.get("value_rank", 0))
    assert code.shape[-1] == fold.code_width
    for layer in LAYERS:
        assert [part.shape for part in fold.decode(layer, code)] == [(2, 5, WIDTH)] * 2
        assert not fold.holds(layer)


@pytest.mark.parametrize("settings", SETTINGS)
def test_affine_maps_equal_decoding(settings):
    fold = latent(**settings)
    code = fold.encode(activations(fold))
    for layer in LAYERS:
        maps = fold.affine_keys(layer), fold.affine_values(layer)
        for map_, expected in zip(maps, fold.decode(layer, code), strict=True):
            torch.testing.assert_close(code @ map_.weight.T + map_.bias, expected)


def test_a_code_of_the_groups_own_keys_needs_a_window_and_one_of_an_early_state_does_not():
    assert latent().needs_window
    assert not latent(split=1, hidden_size=12).needs_window


def test_unit_keys_make_the_length_of_a_key_irrelevant_but_not_that_of_a_value():
    fold = latent(unit_keys=True)
    given = activations(fold)
    code = fold.encode(given)
    longer = {s: 7 * x if s.kind == "keys" else x for s, x in given.items()}
    torch.testing.assert_close(fold.encode(longer), code, atol=1e-4, rtol=1e-4)
    louder = {s: 7 * x if s.kind == "values" else x for s, x in given.items()}
    assert not torch.allclose(fold.encode(louder), code)


def test_unit_rms_heads_normalises_each_head_on_its_own():
    keys = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(2))
    heads = unit_rms_heads(keys, HEAD_DIM).view(2, 5, 2, HEAD_DIM)
    torch.testing.assert_close(heads.pow(2).mean(-1), torch.ones(2, 5, 2), atol=1e-4, rtol=0)


def test_separate_codes_keep_keys_and_values_apart():
    fold = latent(value_rank=3)
    given = activations(fold)
    changed = {s: x + 1 if s.kind == "values" else x for s, x in given.items()}
    before, after = fold.encode(given), fold.encode(changed)
    assert torch.equal(before[..., :6], after[..., :6])
    for layer in LAYERS:
        assert torch.equal(fold.decode(layer, before)[0], fold.decode(layer, after)[0])


@pytest.mark.parametrize("settings", SETTINGS)
def test_fitting_problems_cover_every_decoder_once(settings):
    fold = latent(**settings)
    decoders = [d for problem in fold.problems() for d in problem.decoders.items()]
    assert {target for target, _ in decoders} == {
        Source(kind, layer) for kind in ("keys", "values") for layer in LAYERS
    }
    assert len({id(linear) for _, linear in decoders}) == 2 * len(LAYERS)
    assert len(fold.problems()) == (2 if "value_rank" in settings else 1)
