"""Where slots are kept: in order, as they are or quantised, and never both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvfold.methods import Bits, CodePart
from kvfold.methods.turboquant import TurboQuant
from kvfold.runtime.buffers import BLOCK
from kvfold.runtime.schedule import Write
from kvfold.runtime.slots import CodeSlots, SlotStore

WIDTH = 16
CODECS = [None, *range(1, 9)]


def vectors(count: int, *, rows: int = 2, heads: int = 3, seed: int = 0) -> torch.Tensor:
    """(rows, heads, count, WIDTH)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, count, WIDTH, generator=generator)


def store(bits: int | None) -> SlotStore:
    """An empty one."""
    return SlotStore(None if bits is None else TurboQuant(WIDTH, bits, 5))


def expected(bits: int | None, values: torch.Tensor) -> torch.Tensor:
    """What a store gives back of some values."""
    if bits is None:
        return values
    codec = TurboQuant(WIDTH, bits, 5)
    return codec.decode(codec.encode(values))


def alike(start: int, count: int) -> Write:
    """The next slots of all rows."""
    return Write(slice(0, count), slice(start, start + count))


@pytest.mark.parametrize("bits", CODECS)
def test_slots_come_back_in_order_as_they_were_written(bits: int | None) -> None:
    """Written a few at a time, over several growths of the buffer."""
    held, values = store(bits), vectors(3 * BLOCK + 5)
    start = 0
    for count in (1, 3, BLOCK, 60, 2 * BLOCK, 9):
        count = min(count, values.shape[2] - start)
        held.write(alike(start, count), values[:, :, start : start + count], start + count)
        start += count
    whole = expected(bits, values)
    torch.testing.assert_close(held.read(slice(0, start)), whole[:, :, :start])
    torch.testing.assert_close(held.read(slice(7, 71)), whole[:, :, 7:71])


@pytest.mark.parametrize("bits", [None, 3, 8])
def test_rows_can_be_at_different_slots(bits: int | None) -> None:
    """Each value goes to its own row and slot."""
    held, values = store(bits), vectors(2)
    held.write(alike(0, 2), values, 2)
    more = vectors(2, seed=1)
    rows, source, target = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), torch.tensor([2, 3, 2])
    held.write(Write(source, target, rows), more, 4)
    back, first, second = held.read(slice(0, 4)), expected(bits, values), expected(bits, more)
    torch.testing.assert_close(back[:, :, :2], first)
    torch.testing.assert_close(back[0, :, 2:4], second[0])
    torch.testing.assert_close(back[1, :, 2], second[1, :, 1])


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_quantised_store_keeps_packed_codes_and_one_scale_and_no_floats(bits: int) -> None:
    """To the byte."""
    held = store(bits)
    held.write(alike(0, 5), vectors(5), 5)
    tensors = held.tensors()
    assert {name: t.dtype for name, t in tensors.items()} == {
        "values": torch.uint8,
        "scales": torch.float16,
    }
    assert tensors["values"].shape == (2, 3, BLOCK, WIDTH * bits // 8)
    assert tensors["scales"].shape == (2, 3, BLOCK, 1)
    reachable = [t for t in vars(held).values() if isinstance(t, torch.Tensor)]
    assert all(t.dtype != torch.float32 for t in reachable)


@pytest.mark.parametrize("bits", [2, 8])
def test_rotated_slots_give_the_same_products_with_rotated_queries(bits: int) -> None:
    """One transform of the query instead of one of every slot."""
    held, values = store(bits), vectors(9)
    held.write(alike(0, 9), values, 9)
    query = vectors(1, seed=4)
    plain = query @ held.read(slice(2, 9)).transpose(2, 3)
    assert held.codec is not None
    rotated = held.codec.rotate(query) @ held.read_rotated(slice(2, 9)).transpose(2, 3)
    torch.testing.assert_close(rotated, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_slots_come_back_in_the_dtype_that_they_came_in(
    bits: int | None, dtype: torch.dtype
) -> None:
    """The model's."""
    held = store(bits)
    held.write(alike(0, 4), vectors(4).to(dtype), 4)
    assert held.read(slice(0, 4)).dtype == dtype


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_told_once_and_does_not_stop_the_write(value: float) -> None:
    """The cache looks at all stores once a step."""
    held = store(4)
    assert held.take_finite() is None
    held.write(alike(0, 4), vectors(4), 4)
    told = held.take_finite()
    assert told is not None and bool(told)
    bad = vectors(4)
    bad[1, 2, 3, 0] = value
    held.write(alike(4, 4), bad, 8)
    told = held.take_finite()
    assert told is not None and not bool(told)
    assert held.take_finite() is None
    assert store(None).take_finite() is None


@pytest.mark.parametrize("bits", [None, 5])
def test_a_copy_has_tensors_of_its_own(bits: int | None) -> None:
    """What is written to one is not seen in the other."""
    held, values = store(bits), vectors(6)
    held.write(alike(0, 6), values, 6)
    copied = held.copied()
    copied.write(alike(0, 6), vectors(6, seed=2), 6)
    torch.testing.assert_close(held.read(slice(0, 6)), expected(bits, values))
    torch.testing.assert_close(copied.read(slice(0, 6)), expected(bits, vectors(6, seed=2)))


@pytest.mark.parametrize("bits", [None, 5])
def test_rows_can_be_chosen(bits: int | None) -> None:
    """Codes and scales move together."""
    held, values = store(bits), vectors(6, rows=3)
    held.write(alike(0, 6), values, 6)
    held.map(lambda tensor: tensor[[2, 0]])
    torch.testing.assert_close(held.read(slice(0, 6)), expected(bits, values)[[2, 0]])


PARTS = (CodePart("keys", 2, 8), CodePart("values", 2, 8))


def codes(count: int, width: int = 32) -> torch.Tensor:
    """(2, 1, count, width)."""
    return torch.randn(2, 1, count, width, generator=torch.Generator().manual_seed(3))


def test_a_whole_code_comes_back_as_it_is() -> None:
    """Without bits there is one store for all parts."""
    held, values = CodeSlots(PARTS, None), codes(7)
    held.write(alike(0, 7), values, 7)
    assert torch.equal(held.read(slice(1, 6)), values[:, :, 1:6])
    assert len(held.stores) == 1


def test_each_head_of_each_part_is_quantised_as_a_vector_of_its_own() -> None:
    """Keys in the keys' bits, values in the values'."""
    held, values = CodeSlots(PARTS, Bits(8, 2, 7)), codes(7)
    held.write(alike(0, 7), values, 7)
    back = held.read(slice(0, 7))
    for head in range(4):
        codec = TurboQuant(8, 8 if head < 2 else 2, 7)
        own = slice(8 * head, 8 * head + 8)
        alone = codec.decode(codec.encode(values[..., own].contiguous()))
        torch.testing.assert_close(back[..., own], alone)
    error = (back - values).pow(2).mean(dim=(0, 1, 2))
    assert error[:16].max() < error[16:].min()


def test_a_code_of_keys_and_values_at_once_has_the_keys_bits() -> None:
    """A latent code can't tell them apart."""
    held = CodeSlots((CodePart("both", 1, 24),), Bits(3, 8, 7))
    held.write(alike(0, 7), codes(7, 24), 7)
    (only,) = held.stores
    assert only.codec is not None
    assert (only.codec.width, only.codec.bits) == (24, 3)
    assert held.read(slice(0, 7)).shape == (2, 1, 7, 24)


@pytest.mark.parametrize("bits", [None, Bits(4, 4, 0)])
def test_copies_and_chosen_rows_of_codes_are_their_own(bits: Any) -> None:
    """As of single stores."""
    held = CodeSlots(PARTS, bits)
    held.write(alike(0, 5), codes(5), 5)
    before = held.read(slice(0, 5)).clone()
    copied = held.copied()
    copied.map(lambda tensor: tensor[[1]])
    assert torch.equal(copied.read(slice(0, 5)), before[[1]])
    copied.write(alike(0, 5), codes(5)[[0]] + 1, 5)
    assert torch.equal(held.read(slice(0, 5)), before)
