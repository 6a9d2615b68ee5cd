"""CSA2 on plain tensors."""

from __future__ import annotations

import pytest
import torch

from kvfold.methods import CedMaps, Csa2Fold, Source

KV_HEADS, HEAD_DIM = 2, 4
SHAPE = (KV_HEADS, HEAD_DIM)
WIDTH = KV_HEADS * HEAD_DIM


def shaken(fold, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in fold.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return fold


def activations(*layers):
    generator = torch.Generator().manual_seed(1)
    return {
        Source(kind, layer): torch.randn(2, 5, WIDTH, generator=generator)
        for kind in ("keys", "values")
        for layer in layers
    }


@pytest.mark.parametrize("form", ["joint", "separate"])
def test_the_source_is_stored_as_it_is_and_readers_are_mapped(form):
    fold = shaken(Csa2Fold(3, (4, 5), *SHAPE, form=form))
    given = activations(3)
    code = fold.encode(given)
    keys, values = given[Source("keys", 3)], given[Source("values", 3)]
    torch.testing.assert_close(code, torch.cat([keys, values], dim=-1))
    assert fold.holds(3)
    torch.testing.assert_close(torch.cat(fold.decode(3, code), -1), code)
    for reader in (4, 5):
        assert not fold.holds(reader)
        mapped, _ = fold.decode(reader, code)
        base = fold.keys[str(reader)].base
        torch.testing.assert_close(mapped, base(code if form == "joint" else keys))


def test_separate_readers_do_not_mix_keys_and_values():
    fold = shaken(Csa2Fold(3, (4,), *SHAPE, form="separate"))
    given = activations(3)
    changed = {**given, Source("values", 3): given[Source("values", 3)] + 1}
    keys, values = fold.decode(4, fold.encode(given))
    other_keys, other_values = fold.decode(4, fold.encode(changed))
    assert torch.equal(keys, other_keys)
    assert not torch.allclose(values, other_values)


@pytest.mark.parametrize("form", ["joint", "separate"])
@pytest.mark.parametrize("value_source", [None, 2])
def test_affine_maps_equal_decoding(form, value_source):
    fold = shaken(Csa2Fold(3, (4, 5), *SHAPE, form=form, value_source=value_source))
    code = torch.randn(2, 5, fold.code_width, generator=torch.Generator().manual_seed(2))
    checked = 0
    for layer in fold.layers:
        for map_, expected in zip(
            (fold.affine_keys(layer), fold.affine_values(layer)),
            fold.decode(layer, code),
            strict=True,
        ):
            if map_ is not None:
                torch.testing.assert_close(code @ map_.weight.T + map_.bias, expected)
                checked += 1
    assert checked == (4 if value_source is None else 6)


def test_a_residual_map_is_not_affine_and_starts_as_its_linear_base():
    plain = Csa2Fold(3, (4,), *SHAPE)
    residual = Csa2Fold(3, (4,), *SHAPE, residual_hidden=16)
    assert residual.affine_keys(4) is None
    code = torch.randn(2, 5, 2 * WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for fold in (plain, residual):
            fold.keys["4"].base.weight.fill_(0.5)
            fold.values["4"].base.bias.fill_(0.25)
    for a, b in zip(plain.decode(4, code), residual.decode(4, code), strict=True):
        assert torch.equal(a, b)


def test_a_residual_map_can_learn_from_its_start():
    fold = Csa2Fold(3, (4,), *SHAPE, residual_hidden=16)
    code = torch.randn(2, 5, 2 * WIDTH, generator=torch.Generator().manual_seed(2))
    keys, values = fold.decode(4, code)
    (keys.sum() + values.sum()).backward()
    assert all(maps["4"].mlp[2].weight.grad.any() for maps in (fold.keys, fold.values))


def test_the_cards_reader_has_its_parameter_count():
    three = Csa2Fold(19, (23, 27, 31), 4, 256, form="separate", bias=False, residual_hidden=1536)
    assert three.parameter_count() == 3 * 8_388_608


def test_a_value_source_of_its_own_serves_both_layers():
    fold = shaken(Csa2Fold(2, (4,), *SHAPE, value_source=3))
    assert fold.layers == (2, 3, 4)
    assert fold.needs_window
    given = activations(2, 3)
    code = fold.encode({s: given[s] for s in fold.inputs})
    assert torch.equal(fold.decode(2, code)[0], given[Source("keys", 2)])
    assert torch.equal(fold.decode(3, code)[1], given[Source("values", 3)])


def test_ced_regenerates_what_the_source_stores():
    maps = CedMaps(2, (3,), 24, *SHAPE)
    fold = shaken(Csa2Fold(3, (4,), *SHAPE, ced=maps))
    assert fold.inputs == (Source("hidden", 2),)
    assert not fold.needs_window
    given = {Source("hidden", 2): torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))}
    expected = maps.project(3, maps.features(given))
    for got, want in zip(fold.decode(3, fold.encode(given)), expected, strict=True):
        torch.testing.assert_close(got, want)
    stages = [problem.stage for problem in fold.problems()]
    assert stages == sorted(stages)
    assert set(stages) == {0, 1}
