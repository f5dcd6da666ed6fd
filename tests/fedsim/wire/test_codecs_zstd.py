"""zstd and delta+zstd: bit for bit on anything; frames that lie about their size get no memory."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.wire.codecs import Part, Spec, codec, raw_bytes, unpack_checked
from fedsim.wire.codecs.zstd import compressed, expanded, ordered

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=80)
LOSSLESS = ["zstd", "delta+zstd"]
MB = 2**20


def spec_of(x: Tensor) -> Spec:
    return Spec.of(tuple(x.shape), x.dtype)


def packed(name: str, x: Tensor, ref: Tensor) -> tuple[Part, ...]:
    parts = codec(name).pack(x, spec_of(x), ref)
    assert parts is not None
    return tuple((layer, memoryview(bytes(data))) for layer, data in parts)


def survives(name: str, x: Tensor, ref: Tensor) -> bool:
    """Layers, shape and every bit: packed and unpacked with the same reference."""
    back = codec(name).unpack(tuple(data for _, data in packed(name, x, ref)), spec_of(x), ref.clone())
    return back.shape == x.shape and back.dtype == x.dtype and bytes(raw_bytes(back)) == bytes(raw_bytes(x))


@st.composite
def pairs(draw: Any) -> tuple[Tensor, Tensor]:
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    size = math.prod(shape) * dtype.itemsize

    def tensor() -> Tensor:
        data = bytearray(draw(st.binary(min_size=size, max_size=size)))
        return torch.frombuffer(data, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)

    return tensor(), tensor()


@pytest.mark.parametrize("name", LOSSLESS)
@fixed
@given(pair=pairs())
def test_any_bits_survive_with_any_reference(name: str, pair: tuple[Tensor, Tensor]) -> None:
    assert survives(name, *pair)


def test_what_hardly_moved_is_small_against_its_reference() -> None:
    draws = torch.Generator().manual_seed(2)
    ref = torch.randn(50_000, generator=draws)
    x = ref + 1e-4 * torch.randn(50_000, generator=draws)
    plain, delta = (packed(name, x, ref)[0][1].nbytes for name in LOSSLESS)
    assert plain < 200_000 and delta < 0.7 * plain
    assert packed("delta+zstd", ref, ref)[0][1].nbytes < 100


def test_integers_keep_the_order_of_the_floats() -> None:
    draws = torch.Generator().manual_seed(3)
    x = (
        torch.randn(1000, generator=draws, dtype=torch.float64)
        * 10.0 ** torch.arange(-30, 30).repeat(20)[:1000]
    )
    for dtype in (torch.float32, torch.float64):
        rising = torch.cat([x.to(dtype), torch.tensor([-math.inf, math.inf, 0.0], dtype=dtype)]).unique()
        assert (np.diff(ordered(rising).astype(np.float64)) > 0).all()
    assert ordered(torch.tensor([-(2.0**-149), -0.0, 0.0, 2.0**-149])).tolist() == [-2, -1, 0, 1]


@pytest.mark.parametrize("ref", [None, torch.ones(3), torch.ones(2, 2)])
def test_a_delta_needs_a_reference_of_the_same_shape(ref: Tensor | None) -> None:
    x = torch.ones(4)
    with pytest.raises(UsageError, match="needs the same field of the broadcast to refer to"):
        codec("delta+zstd").pack(x, spec_of(x), ref)
    parts = packed("delta+zstd", x, x)
    with pytest.raises(UsageError, match="needs the same field of the broadcast to refer to"):
        unpack_checked("delta+zstd", parts, spec_of(x), "x", ref)


# ---- frames


def without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_content_size=False).compress(data)


SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
DATA = bytes(range(200)) * 5


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (without_size(DATA), "a zstd frame does not declare its size; the layout demands 1000"),
        (compressed(DATA[:-1]), "a zstd frame declares 999 bytes; the layout demands 1000"),
        (compressed(bytes(64 * MB)), "declares 67108864 bytes; the layout demands 1000"),
        (SKIPPABLE + compressed(DATA), "a zstd frame declares 0 bytes"),
        (compressed(DATA) + compressed(DATA), "a damaged zstd frame"),
        (compressed(DATA)[:-1], "a damaged zstd frame"),
        (b"", "a damaged zstd frame"),
    ],
)
def test_frames_of_another_size_are_refused(frame: bytes, says: str) -> None:
    assert expanded(memoryview(compressed(DATA)), 1000) == DATA
    with pytest.raises(WireError, match=says):
        expanded(memoryview(frame), 1000)


def test_nothing_is_compressed_to_nothing() -> None:
    assert compressed(b"") == b"" == expanded(memoryview(b""), 0)
    with pytest.raises(WireError, match="where there is nothing to compress"):
        expanded(memoryview(compressed(b"1")), 0)


def lying(frame: bytes, size: int) -> bytes:
    """The frame with another declared size: an 8-byte field, whatever it had."""
    header = zstandard.frame_header_size(frame)
    return frame[:4] + bytes([0b1110_0000]) + size.to_bytes(8, "little") + frame[header:]


@pytest.mark.parametrize("name", ["zstd", "delta+zstd", "bitmap:0.1", "best:0.1", "topk:0.1"])
@pytest.mark.parametrize("declared", ["bomb", "lie", "none"])
def test_a_bomb_takes_no_memory(name: str, declared: str) -> None:
    """512 MB of zeros in a frame of some kB, which a receiver of 40,000 bytes refuses."""
    zeros = bytes(8 * MB)
    bomb = {
        "bomb": lambda: lying(compressed(zeros), 512 * MB),
        "lie": lambda: lying(compressed(zeros), 40_000),
        "none": lambda: without_size(zeros),
    }[declared]()
    spec = Spec.of((10_000,), torch.float32)
    x = torch.arange(1.0, 10_001)
    parts = list(packed(name, x, x))
    layer, data = parts[-1]
    side = bytes(data[:4]) if name.startswith(("bitmap", "best")) else b""
    if declared == "lie" and len(parts) > 1:
        bomb = lying(compressed(zeros), 1000 * (2 if name.startswith("best") else 4))
    parts[-1] = (layer, memoryview(side + bomb))
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="x: "):
            unpack_checked(name, tuple(parts), spec, "x", torch.zeros(10_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MB / 2


@fixed
@given(st.sampled_from(LOSSLESS), st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_damaged_frames_give_a_tensor_or_a_wire_error(name: str, where: int, byte: int, cut: bool) -> None:
    x = torch.linspace(-1, 1, 300)
    ((layer, data),) = packed(name, x, torch.zeros(300))
    broken = bytearray(data)
    where %= len(broken)
    if cut:
        del broken[where:]
    else:
        broken[where] = byte
    output = "x: "
    try:
        back = unpack_checked(name, ((layer, memoryview(broken)),), spec_of(x), "x", torch.zeros(300))
        assert back.shape == x.shape and not cut
    except WireError as e:
        output = str(e)
    assert output.startswith("x: ")
