"""TurboQuant on plain tensors: error, norms, packing, dtypes, foreign codes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.errors import CacheError, PlanError
from kvfold.methods.codebooks import levels, nearest
from kvfold.methods.turboquant import DENSE_WIDTH, Quantised, TurboQuant, pack, unpack

WIDTHS = (48, 64, 72, 80, 96, 128, 240, 256, 576, 1152)
ALL_BITS = range(1, 9)
EXPECTED = {1: 0.3634, 2: 0.1175, 3: 0.03455, 4: 0.00950}
"""Relative squared error of each bit width on normal data: the paper's table."""
TABLE_TOLERANCE = 0.02
NARROW = 5.0
"""At width d the error lies up to NARROW / d below the table: a vector's own rms is known
exactly, which leaves fewer outliers than a normal has. Measured: 1.0, 2.5, 3.4, 4.3 over d at 1,
2, 3, 4 bits."""
STRUCTURED = 1.15
"""Largest error over the table's that vectors far from normal may have, on average."""
SCALE_ERROR = 2.0**-10
"""Relative error of a float16 scale, with room for float32 sums."""


def vectors(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angle_error(x, y):
    """Mean sin^2 of the angle between: the squared error at the best scale."""
    cosine = torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1)
    return float((1 - cosine.square()).mean())


def round_trip(codec, x, dtype=torch.float32):
    return codec.decode(codec.encode(x), dtype)


@pytest.mark.parametrize("bits", EXPECTED)
@pytest.mark.parametrize("width", WIDTHS)
def test_error_on_normal_data_is_the_published_one(width, bits):
    x = vectors(600_000 // width, width, seed=width)
    y = round_trip(TurboQuant(width, bits, seed=1), x)
    found, most = angle_error(x, y), EXPECTED[bits] * (1 + TABLE_TOLERANCE)
    assert EXPECTED[bits] * (1 - NARROW / width) * (1 - TABLE_TOLERANCE) <= found <= most
    # With the norm kept, the two sides of the angle are equally long.
    relative = float(((x - y).square().sum(-1) / x.square().sum(-1)).mean())
    assert relative == pytest.approx(2 - 2 * math.sqrt(1 - found), rel=0.01)


@pytest.mark.parametrize(("width", "most"), [(64, 3.7e-5), (256, 5.1e-5), (1152, 6.6e-5)])
def test_eight_bits_err_less_than_a_fixed_range_would(width, most):
    x = vectors(200_000 // width, width)
    assert angle_error(x, round_trip(TurboQuant(width, 8, seed=1), x)) < most < 7.5e-5


def far_from_normal(kind, width):
    x = vectors(256, width, seed=3)
    if kind == "one value":
        return torch.eye(width)
    if kind == "one large channel":
        x[:, 3] *= 30
    if kind == "first half":
        x[:, width // 2 :] *= 0.03
    if kind == "decaying":
        x = x / torch.arange(1, width + 1)
    return x


@pytest.mark.parametrize("kind", ["one value", "one large channel", "first half", "decaying"])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_shape_of_the_data_raises_the_error(width, kind):
    x = far_from_normal(kind, width)
    for bits, expected in EXPECTED.items():
        assert angle_error(x, round_trip(TurboQuant(width, bits, seed=0), x)) < (
            STRUCTURED * expected
        )


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_norms_are_kept(bits, magnitude):
    x = vectors(500, 64) * magnitude
    norms = round_trip(TurboQuant(64, bits, seed=0), x).norm(dim=-1)
    assert float((norms / x.norm(dim=-1) - 1).abs().max()) < SCALE_ERROR


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_scale_beyond_float16_marks_its_vector_only(dtype, bits):
    largest = 1e30 if dtype != torch.float64 else 1e300
    for magnitude in (1e6, largest):
        x = vectors(20, 64, dtype=dtype)
        codec = TurboQuant(64, bits, seed=0)
        expected = codec.encode(x)
        x[1] *= magnitude
        stored = codec.encode(x)
        others = torch.arange(20) != 1
        assert stored.scales[1].isinf().all()
        assert torch.equal(stored.codes[others], expected.codes[others])
        assert torch.equal(stored.scales[others], expected.scales[others])


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("width", [48, 576])
def test_zero_vectors_decode_to_zero(width, bits):
    x = torch.zeros(3, width)
    x[1] = vectors(width)
    y = round_trip(TurboQuant(width, bits, seed=0), x)
    assert not y[0].any() and not y[2].any() and y[1].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("rows", [4, 400])
def test_a_value_that_is_not_finite_marks_its_vector_only(rows, bits, bad):
    x = vectors(rows, 64)
    codec = TurboQuant(64, bits, seed=0)
    expected = codec.encode(x)
    x[1, 7] = bad
    stored = codec.encode(x)
    others = torch.arange(rows) != 1
    assert stored.scales[1].isnan().all() and codec.decode(stored)[1].isnan().all()
    assert torch.equal(stored.scales[others], expected.scales[others])
    assert torch.equal(stored.codes[others], expected.codes[others])


def test_presets_cost_what_they_promise():
    k8v4 = (TurboQuant(256, 8, 0).bits_per_value + TurboQuant(256, 4, 0).bits_per_value) / 2
    assert k8v4 == 6.0625 <= 6.1
    assert 16 / k8v4 == pytest.approx(2.64, abs=0.005)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_stored_bytes_are_the_reported_ones(bits):
    for width in (8, 64, 240, 33):
        codec = TurboQuant(width, bits, seed=0)
        stored = codec.encode(vectors(2, 5, width))
        assert stored.codes.shape == (2, 5, codec.row_bytes)
        assert stored.codes.dtype == torch.uint8 and stored.scales.dtype == torch.float16
        assert stored.nbytes * 8 == pytest.approx(codec.bits_per_value * width * 10)
        if width % 8 == 0:
            assert codec.row_bytes * 8 == width * bits
        else:
            assert width * bits <= codec.row_bytes * 8 < width * bits + 24


@given(st.data(), st.sampled_from(ALL_BITS), st.integers(1, 70))
def test_packing_round_trips(data, bits, width):
    drawn = st.lists(st.integers(0, 2**bits - 1), min_size=2 * width, max_size=2 * width)
    codes = torch.tensor(data.draw(drawn), dtype=torch.uint8).view(2, width)
    rows = pack(codes, bits)
    assert rows.shape == (2, TurboQuant(width, bits, 0).row_bytes)
    assert torch.equal(unpack(rows, bits, width), codes)


def test_packed_layout_is_the_documented_one():
    """Other code reads it, and so do older caches: low fields first, each over whole bytes."""
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [1 | 5 << 4, 2 | 6 << 4, 3 | 7 << 4, 4]
    low = [1 | 3 << 2 | 1 << 4 | 3 << 6, 2 | 0 << 2 | 2 << 4 | 0 << 6]
    assert pack(codes, 3).tolist() == [*low, 0b01111000]


def test_codes_are_the_nearest_levels_of_the_rotated_vector():
    x = vectors(30, 80, dtype=torch.float64)
    for bits in range(1, 8):
        codec = TurboQuant(80, bits, seed=5)
        turned = codec.rotate(x)
        unit = turned / turned.square().mean(-1, keepdim=True).sqrt()
        expected = levels(nearest(unit, bits), bits, torch.float64)
        found = codec.decode_rotated(codec.encode(x), torch.float64)
        scale = found.norm(dim=-1, keepdim=True) / expected.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(found, expected * scale)


def test_equal_seeds_give_equal_codes_and_others_do_not():
    x = vectors(10, 64)
    first, again, other = (TurboQuant(64, 4, seed).encode(x) for seed in (3, 3, 4))
    assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)
    assert not torch.equal(first.codes, other.codes)
    assert first.signature == again.signature != other.signature


def test_the_rotation_of_a_seed_never_changes():
    """Stored codes depend on it: whoever changes it must raise VERSION."""
    signs = TurboQuant(16, 4, seed=7).rotate(torch.eye(16))[:, 0].sign()
    assert "".join("-+"[int(sign > 0)] for sign in signs) == "+++-+---+++-----"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_quantised_in_float32(dtype):
    codec = TurboQuant(64, 4, seed=0)
    x = vectors(2, 3, 64, dtype=dtype)
    stored, wide = codec.encode(x), codec.encode(x.float())
    assert torch.equal(stored.codes, wide.codes) and torch.equal(stored.scales, wide.scales)
    decoded = codec.decode(stored, dtype)
    assert decoded.dtype == dtype and torch.equal(decoded, codec.decode(wide).to(dtype))
    assert codec.decode_rotated(stored, dtype).dtype == dtype


def test_float64_is_quantised_in_float64():
    codec = TurboQuant(64, 8, seed=0)
    x = vectors(50, 64).double()
    wide = codec.decode(codec.encode(x), torch.float64)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(
        codec.rotate(wide), codec.decode_rotated(codec.encode(x), wide.dtype)
    )


@pytest.mark.parametrize("width", [1, 2, 7, 16, 33, *WIDTHS, 8192])
def test_rotation_is_orthogonal_and_undone(width):
    codec = TurboQuant(width, 4, seed=2)
    x = vectors(2, 3, width, dtype=torch.float64)
    turned = codec.rotate(x)
    torch.testing.assert_close(codec.unrotate(turned), x)
    gram, expected = (torch.einsum("bnd,bmd->bnm", y, y) for y in (turned, x))
    torch.testing.assert_close(gram, expected)
    if width > 16:
        assert float((turned - x).norm() / x.norm()) > 1
    assert codec.rotate(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("width", [DENSE_WIDTH, DENSE_WIDTH + 64, 576])
def test_rotation_by_factors_and_by_one_matrix_are_alike(width):
    codec = TurboQuant(width, 4, seed=2)
    x = vectors(5, width, dtype=torch.float64)
    matrix = codec.rotate(torch.eye(width, dtype=torch.float64))
    torch.testing.assert_close(x @ matrix, codec.rotate(x))
    torch.testing.assert_close(x @ matrix.T, codec.unrotate(x))


@pytest.mark.parametrize("width", [64, 1152])
def test_products_may_be_taken_in_the_rotated_basis(width):
    codec = TurboQuant(width, 4, seed=2)
    query, keys = vectors(1, width, seed=8), codec.encode(vectors(20, width))
    rotated = codec.rotate(query) @ codec.decode_rotated(keys).T
    torch.testing.assert_close(rotated, query @ codec.decode(keys).T, atol=1e-4, rtol=1e-4)


def test_any_leading_shape_and_stride_will_do():
    codec = TurboQuant(64, 3, seed=0)
    x = vectors(2, 5, 3, 64)
    whole = codec.encode(x)
    turned = codec.encode(x.transpose(1, 2))
    assert torch.equal(turned.codes, whole.codes.transpose(1, 2))
    part = Quantised(whole.codes[:, 1:4], whole.scales[:, 1:4], whole.signature)
    assert torch.equal(codec.decode(part), codec.decode(whole)[:, 1:4])
    assert codec.decode(codec.encode(x[:, :0])).shape == (2, 0, 3, 64)
    assert codec.decode(codec.encode(x[0, 0, 0])).shape == (64,)


def test_encoding_carries_no_gradient_and_rotation_does():
    codec = TurboQuant(64, 4, seed=0)
    x = vectors(2, 64).requires_grad_()
    assert not codec.encode(x).scales.requires_grad
    codec.rotate(x)[0, 0].backward()
    assert x.grad is not None and x.grad[0].norm() == pytest.approx(1.0)


def test_a_rotation_first_used_in_inference_mode_serves_autograd_later():
    for width in (24, 320):
        codec = TurboQuant(width, 4, seed=11)
        with torch.inference_mode():
            codec.rotate(torch.ones(width))
        x = torch.ones(width, requires_grad=True)
        codec.rotate(x).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("other", [{"seed": 1}, {"bits": 3}, {"width": 32, "bits": 8}])
def test_foreign_codes_are_refused(other):
    settings = {"width": 64, "bits": 4, "seed": 0}
    stored = TurboQuant(**settings).encode(vectors(2, 64))
    reader = TurboQuant(**{**settings, **other})
    for read in (reader.decode, reader.decode_rotated):
        with pytest.raises(CacheError, match="settings that made them"):
            read(stored)


def test_damaged_codes_are_refused():
    codec = TurboQuant(64, 4, seed=0)
    stored = codec.encode(vectors(2, 64))
    for codes, scales in (
        (stored.codes[:, :-1], stored.scales),
        (stored.codes[:1], stored.scales),
        (stored.codes.int(), stored.scales),
    ):
        with pytest.raises(CacheError, match="slice both alike"):
            codec.decode(Quantised(codes, scales, stored.signature))


def test_vectors_of_another_width_or_of_whole_numbers_are_refused():
    codec = TurboQuant(64, 4, seed=0)
    for call in (codec.encode, codec.rotate, codec.unrotate):
        with pytest.raises(CacheError, match="must be 64 wide"):
            call(vectors(2, 63))
    with pytest.raises(CacheError, match="floating-point"):
        codec.encode(torch.ones(2, 64, dtype=torch.int64))


@pytest.mark.parametrize("bits", [0, 9, -1, 2.0, True, "4"])
def test_only_one_to_eight_bits_exist(bits):
    with pytest.raises(PlanError, match="from 1 to 8"):
        TurboQuant(64, bits, seed=0)


@pytest.mark.parametrize("width", [0, -4, 6.0])
def test_a_vector_has_at_least_one_value(width):
    with pytest.raises(PlanError, match="at least 1"):
        TurboQuant(width, 4, seed=0)
