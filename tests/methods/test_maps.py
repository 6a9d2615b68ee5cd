"""The maps that methods are made of."""

from __future__ import annotations

import torch

from kvfold.methods.maps import ResidualMap, affine_bias, rms_normalize


def test_a_new_map_is_zero_with_and_without_a_residual():
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for hidden in (0, 5):
        assert not ResidualMap(6, 4, bias=True, residual_hidden=hidden)(x).any()


def test_an_affine_map_reads_its_own_columns_of_the_code():
    map_ = ResidualMap(3, 4, bias=False)
    torch.nn.init.normal_(map_.base.weight, generator=torch.Generator().manual_seed(0))
    code = torch.randn(7, 10, generator=torch.Generator().manual_seed(1))
    affine = map_.affine(10, 5)
    torch.testing.assert_close(code @ affine.weight.T + affine.bias, map_(code[:, 5:8]))


def test_a_missing_bias_counts_as_zeros():
    assert torch.equal(affine_bias(torch.nn.Linear(2, 3, bias=False)), torch.zeros(3))


def test_rms_normalisation_is_done_in_float32_for_half_precision():
    x = torch.full((1, 4), 3e4, dtype=torch.float16)  # its square overflows float16
    normalized = rms_normalize(x)
    assert normalized.dtype == torch.float16
    torch.testing.assert_close(normalized, torch.ones_like(x), atol=1e-3, rtol=0)
