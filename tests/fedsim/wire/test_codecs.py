"""Codecs: exact where they say so, rounded by as much as they say, of sizes known beforehand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.wire.codecs import CODECS, codec, from_bytes, raw_bytes, unpack_checked
from fedsim.wire.messages import DTYPES

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=60)
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SMALLEST_NORMAL = {"bf16": 2.0**-126, "f16": 2.0**-14}
HALF_UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11}
"""Largest relative error of rounding to nearest with 8 and with 11 bits of precision."""


def round_trip(name: str, x: Tensor) -> Tensor:
    parts = tuple((layer, memoryview(bytes(data))) for layer, data in codec(name).pack(x))
    return unpack_checked(name, parts, tuple(x.shape), NAMES[x.dtype], "test")


@st.composite
def dense_tensors(draw: Any) -> Tensor:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


@fixed
@given(dense_tensors())
def test_dense_is_exact_bit_for_bit(x: Tensor) -> None:
    back = round_trip("dense", x)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert bytes(raw_bytes(back)) == bytes(raw_bytes(x))


@pytest.mark.parametrize("name", ["bf16", "f16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_halves_round_to_nearest(name: str, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(1)
    scale = 2.0 ** torch.randint(-14, 15, (20_000,), generator=draws).to(dtype)
    x = (1 + torch.rand(20_000, generator=draws, dtype=dtype)) * scale
    x[::2] *= -1
    error = ((round_trip(name, x) - x) / x).abs().max().item()
    # float64 goes through float32, which may add a rounding of 2**-24
    assert 0.9 * HALF_UNIT[name] < error <= HALF_UNIT[name] + 2.0**-24
    assert error < 0.004


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_halves_are_idempotent_and_keep_zeros_and_infinities(name: str) -> None:
    x = torch.tensor([0.0, -0.0, 1 / 3, -7.1, SMALLEST_NORMAL[name] / 2, float("inf"), float("-inf")])
    once = round_trip(name, x)
    assert bytes(raw_bytes(round_trip(name, once))) == bytes(raw_bytes(once))
    assert once[[0, 1, 5, 6]].tolist() == x[[0, 1, 5, 6]].tolist()
    assert once.signbit().tolist() == x.signbit().tolist()


def test_half_overflows_above_65504_and_bfloat_does_not() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e5])
    assert round_trip("f16", x).tolist() == [65504.0, 65504.0, math.inf, -math.inf]
    assert round_trip("bf16", x).isfinite().all()


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3), (3, 0, 2)])
def test_sizes_are_what_pack_returns(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    packed = codec(name).pack(torch.ones(shape, dtype=dtype))
    assert tuple((layer, data.nbytes) for layer, data in packed) == codec(name).sizes(
        math.prod(shape), dtype.itemsize
    )


@pytest.mark.parametrize("name", sorted(CODECS))
def test_lossy_says_whether_values_change(name: str) -> None:
    x = torch.tensor([1 / 3, math.pi, 1e-3])
    assert torch.equal(round_trip(name, x), x) is not codec(name).lossy


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("off", [-6, -1, 1, 6])
def test_parts_of_another_size_are_refused(name: str, off: int) -> None:
    ((layer, size),) = codec(name).sizes(6, 4)
    with pytest.raises(WireError, match=f"x: {size + off} bytes of values where the layout demands {size}"):
        unpack_checked(name, ((layer, memoryview(bytes(size + off))),), (6,), "f32", "x")


@pytest.mark.parametrize("name", sorted(CODECS))
def test_another_number_of_parts_or_another_layer_is_refused(name: str) -> None:
    ((layer, size),) = codec(name).sizes(6, 4)
    part = memoryview(bytes(size))
    for parts in ((), ((layer, part), (layer, part))):
        with pytest.raises(WireError, match=f"x: {len(parts)} frames where codec '{name}' sends 1"):
            unpack_checked(name, parts, (6,), "f32", "x")
    with pytest.raises(WireError, match="x: a part of 'indices' where"):
        unpack_checked(name, (("indices", part),), (6,), "f32", "x")


@pytest.mark.parametrize("name", sorted(n for n in CODECS if CODECS[n].lossy))
def test_lossy_codecs_refuse_bytes(name: str) -> None:
    with pytest.raises(UsageError, match="floating-point fields only"):
        codec(name).pack(torch.zeros(3, dtype=torch.uint8))


def test_an_unknown_codec_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown codec 'dence'; did you mean 'dense'"):
        codec("dence")


def test_from_bytes_copies_only_what_is_read_only() -> None:
    buffer = bytearray(raw_bytes(torch.ones(4)))
    view = from_bytes(memoryview(buffer), (2, 2), torch.float32)
    buffer[:4] = raw_bytes(torch.tensor([5.0]))
    assert view.tolist() == [[5, 1], [1, 1]]
    frozen = bytes(buffer)
    from_bytes(memoryview(frozen), (4,), torch.float32).zero_()
    assert frozen == bytes(buffer)
