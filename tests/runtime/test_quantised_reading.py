"""Decode attention over quantised slots: both paths, every bit width, any stride."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.errors import CacheError
from kvfold.methods.turboquant import Quantised, TurboQuant
from kvfold.runtime import quantised_reading
from kvfold.runtime.native import NATIVE_VARIABLE, find_compiler
from kvfold.runtime.quantised_reading import (
    SLOT_BLOCK,
    chosen_path,
    fused_slot_logits,
    fused_slot_mix,
    plain_slot_logits,
    plain_slot_mix,
    slot_logits,
    slot_mix,
    supports,
)

SUMMED_FLOAT32 = {"atol": 3e-4, "rtol": 1e-4}
"""Sums of up to 2,000 float32 products near 1 in two orders; a wrong level errs by 1e-2."""
WIDE_SUM = {"atol": 1e-10, "rtol": 1e-10}
"""The same in float64."""
ALL_BITS = range(1, 9)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def stored(codec, batch=1, heads=2, slots=70, *, spare=0, seed=0):
    """Slots as a cache holds them: the first of a longer buffer."""
    shape = (batch, heads, slots + spare, codec.width)
    made = codec.encode(torch.randn(shape, generator=generator(seed)))
    return Quantised(made.codes[:, :, :slots], made.scales[:, :, :slots], made.signature)


def queries(codec, kept, grouped=3, dtype=torch.float32):
    shape = (*kept.codes.shape[:2], grouped, codec.width)
    return torch.randn(shape, generator=generator(1)).to(dtype)


def weights(kept, grouped=3, dtype=torch.float32):
    """As a softmax over other keys and the slots gives them: a part of a longer row."""
    shape = (*kept.codes.shape[:2], grouped, kept.codes.shape[2] + 5)
    return torch.rand(shape, generator=generator(2)).to(dtype)[..., 5:]


@pytest.fixture
def fused():
    """Skips where nothing can be compiled; where it can, the fused path must be there."""
    if find_compiler() is None or os.environ.get(NATIVE_VARIABLE) == "0":
        pytest.skip("no fused path here: no C++ compiler, or KVFOLD_NATIVE=0")
    assert quantised_reading._kernels() is not None


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("width", [64, 256, 80, 48, 33, 8])
def test_fused_and_plain_agree(fused, width, bits):
    codec = TurboQuant(width, bits, seed=bits)
    kept = stored(codec, batch=2, heads=3, slots=1037, spare=19)
    q, w = queries(codec, kept), weights(kept)
    assert chosen_path(codec, q, kept) == chosen_path(codec, w, kept) == "fused"
    torch.testing.assert_close(
        fused_slot_logits(codec, q, kept), plain_slot_logits(codec, q, kept), **SUMMED_FLOAT32
    )
    torch.testing.assert_close(
        fused_slot_mix(codec, w, kept), plain_slot_mix(codec, w, kept), **SUMMED_FLOAT32
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("grouped", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("slots", [0, 1, 3, 8, 513])
def test_fused_and_plain_agree_for_any_number_of_queries_and_slots(fused, slots, grouped, bits):
    codec = TurboQuant(64, bits, seed=0)
    kept = stored(codec, slots=slots, spare=3)
    q, w = queries(codec, kept, grouped), weights(kept, grouped)
    torch.testing.assert_close(
        fused_slot_logits(codec, q, kept), plain_slot_logits(codec, q, kept), **SUMMED_FLOAT32
    )
    torch.testing.assert_close(
        fused_slot_mix(codec, w, kept), plain_slot_mix(codec, w, kept), **SUMMED_FLOAT32
    )


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_strides_of_every_axis_are_followed(fused, bits):
    """A buffer whose heads and slots are exchanged, every other slot of it, weights likewise."""
    codec = TurboQuant(64, bits, seed=0)
    made = codec.encode(torch.randn(2, 90, 3, 64, generator=generator()))
    kept = Quantised(
        made.codes.transpose(1, 2)[:, :, ::2],
        made.scales.transpose(1, 2)[:, :, ::2],
        made.signature,
    )
    packed = Quantised(kept.codes.contiguous(), kept.scales.contiguous(), kept.signature)
    q = torch.randn(2, 4, 3, 64, generator=generator()).transpose(1, 2)
    w = torch.rand(2, 3, 45, 4, generator=generator()).transpose(2, 3)
    assert not any(x.is_contiguous() for x in (kept.codes, kept.scales, q, w))
    expected = fused_slot_logits(codec, q.contiguous(), packed)
    assert torch.equal(fused_slot_logits(codec, q, kept), expected)
    expected = fused_slot_mix(codec, w.contiguous(), packed)
    assert torch.equal(fused_slot_mix(codec, w, kept), expected)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_plain_paths_equal_attention_over_decoded_vectors(bits):
    """More slots than a block, in float64, against whole decoded keys and values."""
    codec = TurboQuant(80, bits, seed=0)
    kept = stored(codec, slots=2 * SLOT_BLOCK + 7)
    decoded = codec.decode(kept, torch.float64)
    q, w = queries(codec, kept, dtype=torch.float64), weights(kept, dtype=torch.float64)
    logits = plain_slot_logits(codec, codec.rotate(q), kept)
    torch.testing.assert_close(logits, q @ decoded.transpose(2, 3), **WIDE_SUM)
    mixed = codec.unrotate(plain_slot_mix(codec, w, kept))
    torch.testing.assert_close(mixed, w @ decoded, **WIDE_SUM)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_float16_scale_is_read_alike(fused, bits):
    """Subnormal and negative ones too, also where denormals are flushed."""
    codec = TurboQuant(8, bits, seed=0)
    every = torch.arange(65536).to(torch.uint16).view(torch.float16).view(1, 1, -1, 1)
    row = codec.encode(torch.linspace(1.0, 2.0, 8)).codes
    kept = Quantised(row.expand(1, 1, 65536, -1), every, codec.signature)
    q = torch.full((1, 1, 1, 8), 0.5)
    expected = plain_slot_logits(codec, q, kept)
    found = [fused_slot_logits(codec, q, kept)]
    torch.set_flush_denormal(True)
    try:
        found.append(fused_slot_logits(codec, q, kept))
    finally:
        torch.set_flush_denormal(False)
    finite = every.isfinite().view(1, 1, 1, -1)
    for logits in found:
        torch.testing.assert_close(logits[finite], expected[finite], atol=0.0, rtol=1e-5)
        assert not logits[~finite].isfinite().any()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_marked_slot_spoils_its_own_logits_only(bits):
    codec = TurboQuant(64, bits, seed=0)
    kept = stored(codec, slots=20)
    kept.scales[0, 1, 7] = torch.nan
    q = queries(codec, kept)
    for found in (slot_logits(codec, q, kept), plain_slot_logits(codec, q, kept)):
        assert found[0, 1, :, 7].isnan().all() and int(found.isnan().sum()) == q.shape[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_queries_are_computed_in_float32(dtype):
    codec = TurboQuant(64, 4, seed=0)
    kept = stored(codec)
    q, w = queries(codec, kept, dtype=dtype), weights(kept, dtype=dtype)
    for found, expected in (
        (slot_logits(codec, q, kept), slot_logits(codec, q.float(), kept)),
        (slot_mix(codec, w, kept), slot_mix(codec, w.float(), kept)),
    ):
        assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_float64_queries_take_the_plain_path_in_float64():
    codec = TurboQuant(64, 4, seed=0)
    kept = stored(codec)
    q, w = queries(codec, kept, dtype=torch.float64), weights(kept, dtype=torch.float64)
    assert chosen_path(codec, q, kept) == chosen_path(codec, w, kept) == "plain"
    decoded = codec.decode_rotated(kept, torch.float64)
    torch.testing.assert_close(slot_logits(codec, q, kept), q @ decoded.mT, **WIDE_SUM)
    torch.testing.assert_close(slot_mix(codec, w, kept), w @ decoded, **WIDE_SUM)


def test_gradients_of_queries_and_weights_are_not_lost():
    codec = TurboQuant(64, 4, seed=0)
    kept = stored(codec)
    decoded = codec.decode_rotated(kept)
    q, w = queries(codec, kept).requires_grad_(), weights(kept).detach().requires_grad_()
    slot_logits(codec, q, kept).sum().backward()
    slot_mix(codec, w, kept).sum().backward()
    torch.testing.assert_close(q.grad, decoded.sum(2, keepdim=True).expand_as(q))
    torch.testing.assert_close(w.grad, decoded.sum(3)[:, :, None].expand_as(w))
    with torch.no_grad():
        assert supports(codec, q, kept)


def test_what_the_fused_path_was_not_made_for_takes_the_plain_one():
    codec = TurboQuant(64, 4, seed=0)
    kept = stored(codec)
    q = queries(codec, kept)
    assert supports(codec, q, kept)
    wide = Quantised(kept.codes, kept.scales.float(), kept.signature)
    apart = kept.codes.repeat_interleave(2, dim=-1)[..., ::2]
    for other in (wide, Quantised(apart, kept.scales, kept.signature)):
        assert chosen_path(codec, q, other) == "plain"
        torch.testing.assert_close(
            slot_logits(codec, q, other), slot_logits(codec, q, kept), **SUMMED_FLOAT32
        )
    assert not supports(codec, q.to("meta"), kept)


def test_the_number_of_threads_changes_no_bit(fused):
    codec = TurboQuant(64, 4, seed=0)
    kept = stored(codec, batch=2, heads=3, slots=2000)
    q, w = queries(codec, kept), weights(kept)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((slot_logits(codec, q, kept), slot_mix(codec, w, kept)))
    finally:
        torch.set_num_threads(before)
    for logits, mixed in found[1:]:
        assert torch.equal(logits, found[0][0]) and torch.equal(mixed, found[0][1])


class LargestFloat(TorchDispatchMode):
    """Remembers the most values that any floating-point tensor made inside it has."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.values = max(self.values, tensor.numel())
        return made


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("path", ["plain", "fused"])
def test_no_float_copy_of_the_history_is_made(path, bits, request, monkeypatch):
    if path == "fused":
        request.getfixturevalue("fused")
    else:
        monkeypatch.setattr(quantised_reading, "_kernels", lambda: None)
    codec = TurboQuant(64, bits, seed=0)
    slots = 8 * SLOT_BLOCK
    kept = stored(codec, heads=2, slots=slots)
    q, w = queries(codec, kept), weights(kept)
    assert chosen_path(codec, q, kept) == path
    with LargestFloat() as seen:
        slot_logits(codec, q, kept)
        slot_mix(codec, w, kept)
    # Beside a block of decoded slots, only logits and scales are as long as the history.
    assert 0 < seen.values <= max(2 * SLOT_BLOCK * 64, q.shape[1] * q.shape[2] * slots)
    assert seen.values < 2 * slots * 64 / 4


def test_compiled_code_that_errs_is_not_used(monkeypatch, capsys):
    """Kernels that write nothing, as a wrong compilation might."""
    nothing = SimpleNamespace(kvfold_slot_logits=Nothing(), kvfold_slot_mix=Nothing())
    monkeypatch.setattr(quantised_reading, "native_library", lambda source: nothing)
    assert quantised_reading._kernels.__wrapped__() is None
    assert "wrong at 1 bits" in capsys.readouterr().err


class Nothing:
    def __call__(self, *arguments):
        pass


def test_shapes_that_do_not_belong_together_are_refused():
    codec = TurboQuant(64, 4, seed=0)
    kept = stored(codec)
    q, w = queries(codec, kept), weights(kept)
    for wrong in (q[:, :1], q[..., :-1], q[0], q.repeat(2, 1, 1, 1)):
        with pytest.raises(CacheError, match="group query heads by kv head"):
            slot_logits(codec, wrong, kept)
    for wrong in (w[..., 1:], w[:, :1], w[0]):
        with pytest.raises(CacheError, match="a weight for every slot"):
            slot_mix(codec, wrong, kept)
    with pytest.raises(CacheError, match="settings that made them"):
        slot_logits(TurboQuant(64, 4, seed=1), q, kept)
