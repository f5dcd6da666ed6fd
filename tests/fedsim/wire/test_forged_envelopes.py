"""Forged envelopes, by a sender that can compute checksums: each gives a typed message or a WireError.

Accidental damage fails a checksum (test_envelope.py). Here every checksum is right, so the tests reach the
checks behind them: header, schema, layout, codecs.
"""

from __future__ import annotations

import copy
import math
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedsim.errors import WireError
from fedsim.learning.params import Layout, Slice
from fedsim.seeds import RandomStream
from fedsim.wire.codecs import CODECS as ALL
from fedsim.wire.envelope import VERSION, Header, decode, digest, encode, pack, unpack
from fedsim.wire.message_context import MessageContext
from fedsim.wire.schema import (
    DTYPES,
    Delta,
    FieldKind,
    Flag,
    Inputs,
    Logits,
    Mean,
    Owners,
    Precision,
    Scalar,
    Weights,
    check_values,
    values_of,
)

much = settings(deadline=None, derandomize=True, database=None, max_examples=400)
FIELDS = 4
"""Where the fields stand in a header."""
LAYOUT = Layout((Slice("w", (6, 10), 0, 60), Slice("b", (10,), 60, 10), Slice("v", (10, 3), 70, 30)))
DIMS = {"P": 100, "C": 4, "M": 20, "I": 5}


@dataclass(frozen=True)
class OwnMemory:
    inputs: Inputs
    weights: Weights
    owners: Owners


@dataclass(frozen=True)
class Up:
    mean: Mean
    precision: Precision
    delta: Delta
    sums: Annotated[Tensor, FieldKind("statistic", ("C",), dtype="f64")]
    logits: Logits
    kept: Annotated[Tensor, FieldKind("probability", unit=True)]
    loss: Scalar
    started: Flag
    own: OwnMemory | None


CODECS: tuple[dict[str, str], ...] = (
    {},
    {
        "precision": "log8",
        "delta": "topk:0.1",
        "kept": "zstd",
        "logits": "bf16",
        "inputs": "zstd",
        "owners": "zstd",
    },
    {"mean": "delta+zstd", "precision": "csr:0.2", "delta": "zstd", "sums": "bf16", "weights": "f16"},
    {"mean": "zstd", "precision": "bitmap:0.1", "delta": "delta+zstd", "sums": "zstd", "logits": "f16"},
    {"mean": "sigma:0.01", "precision": "ratio:0.25", "delta": "zstd", "kept": "bf16"},
    {
        "mean": "sigma:0.02+dither",
        "precision": "ratio:1.0",
        "delta": "qsgd:4",
        "kept": "delta+zstd",
        "logits": "zstd",
        "owners": "zstd",
    },
    {"mean": "bf16", "precision": "best:0.1", "delta": "f16", "sums": "delta+zstd", "loss": "f16"},
    {"mean": "sigma:10.0%+random", "precision": "ratio:2.0+random", "delta": "bf16"},
    {"mean": "sigma:auto", "precision": "ratio:1.0+random", "delta": "dense"},
)


def draw_up(seed: int) -> Up:
    d = torch.Generator().manual_seed(seed)
    inputs = torch.rand(7, 5, generator=d)
    stored = (255 * inputs).to(torch.uint8) if seed % 2 else inputs
    own = OwnMemory(stored, torch.rand(7, generator=d), torch.arange(7))
    vectors = torch.randn(100, generator=d), torch.rand(100, generator=d) + 0.1, torch.randn(100, generator=d)
    sums, logits = torch.randn(4, generator=d).double(), torch.randn(7, 4, generator=d)
    return Up(*vectors, sums, logits, torch.rand(100, generator=d), 0.5, True, own)


REFS = MessageContext(
    {name: getattr(draw_up(0), name) for name in ("mean", "delta", "sums", "kept")},
    stream=RandomStream(0, "codec"),
)


@dataclass(frozen=True)
class Sample:
    """A sound envelope: its codecs, its header as plain msgpack, its frames."""

    codecs: dict[str, str]
    header: list[Any]
    frames: tuple[bytes, ...]


def samples() -> Iterator[Sample]:
    for seed in range(2):
        for codecs in CODECS:
            payload = encode(draw_up(seed), codecs, DIMS, REFS, LAYOUT)
            envelope = pack(
                Header(VERSION, "upload", "run", 1, 2, 1, 0, 3, 9, payload.fields), payload.frames
            )
            frames = tuple(bytes(memoryview(f)) for f in envelope.frames)
            yield Sample(codecs, msgpack.unpackb(envelope.head[8:]), frames)


SAMPLES = tuple(samples())
CODED = {f[1] for s in SAMPLES for f in s.header[FIELDS]}


def received(sample: Sample, body: bytes, frames: list[bytes]) -> Up | None:
    """What a receiver makes of it; None if it refuses. Any other error is the test's failure."""
    head = struct.pack(">Q", xxhash.xxh3_64_intdigest(body)) + body
    try:
        envelope = unpack([head, *frames], "here")
        up = decode(Up, envelope, sample.codecs, DIMS, "here", REFS, LAYOUT)
        check_values(up, "here")
    except WireError as e:
        if not str(e).startswith("here: "):
            raise
        return None
    for f, value in values_of(up):
        if f.python is not Tensor:
            assert type(value) is f.python
            continue
        assert f.fits(tuple(value.shape), DIMS)
        assert value.dtype is DTYPES[f.kind.dtype] or (f.kind.stored and value.dtype is torch.uint8)
        assert not value.is_floating_point() or bool(value.isfinite().all())
        assert not f.kind.positive or bool((value > 0).all())
    return up


def same(a: Up, b: Up) -> bool:
    pairs = zip(values_of(a), values_of(b), strict=True)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for (_, x), (_, y) in pairs)


def test_the_samples_are_sound_and_show_every_codec() -> None:
    for sample in SAMPLES:
        assert received(sample, msgpack.packb(sample.header), list(sample.frames)) is not None
    families = {name.partition(":")[0] for name in CODED}
    assert families == {name.partition(":")[0] for name in ALL}


def placements(value: Any, at: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Paths to everything in nested lists."""
    if at:
        yield at
    if isinstance(value, list):
        for i, inner in enumerate(value):
            yield from placements(inner, (*at, i))


def changed_number(binary: bytes, data: st.DataObject) -> bytes:
    """The binary with one of its integers near to what it was, at an end of its range, or cut or doubled."""
    start = 8 * data.draw(st.integers(0, len(binary) // 8 - 1)) if len(binary) >= 8 else 0
    (number,) = struct.unpack(">Q", binary[start : start + 8].rjust(8, b"\0"))
    odd = [(number + d) % 2**64 for d in (-4, -1, 1, 4, 8)] + [0, 2**63 - 1, 2**63, 2**64 - 1]
    new = struct.pack(">Q", data.draw(st.sampled_from(odd)))
    how = data.draw(st.sampled_from(["replace", "replace", "drop", "double", "cut"]))
    head, tail = binary[:start], binary[start + 8 :]
    return {"replace": head + new + tail, "drop": head + tail, "double": binary * 2, "cut": binary[:-1]}[how]


ODD: tuple[Any, ...] = (0, 1, -1, 7, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, math.nan, None)
ODD += (True, False, [], [1], [[]], [0] * 9, {}, {"a": 1}, b"x", "", "x" * 65, "\0", "é", "mean", "values")
ODD += ("indices", "f32", "f64", "u8", "i64", "object", "csr", "csr:0", "csr:1e-300", "csr:nan", "dense:1")
ODD += (bytes(8), bytes(16), bytes(56), b"\xff" * 8, b"\xff" * 16, b"\xff" * 56, struct.pack(">q", 100))
ODD += ("bogus", *sorted(CODED))


@much
@given(st.sampled_from(SAMPLES), st.data())
def test_a_changed_header_field_is_noticed_or_of_no_consequence(sample: Sample, data: st.DataObject) -> None:
    """The values are what they were: nothing in a header changes what its frames mean."""
    header = copy.deepcopy(sample.header)
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(list(placements(header))))
        inner = header
        for i in way:
            inner = inner[i]
        change = data.draw(st.sampled_from(["odd", "odd", "drop", "double", "near", "swap"]))
        if change == "drop":
            del inner[last]
        elif change == "double":
            inner.insert(last, copy.deepcopy(inner[last]))
        elif change == "near" and type(inner[last]) is int:
            inner[last] = min(2**64 - 1, max(-(2**63), inner[last] + data.draw(st.integers(-4, 4))))
        elif change == "near" and type(inner[last]) is bytes and inner[last]:
            inner[last] = changed_number(inner[last], data)
        elif change == "swap":
            inner[last], inner[-1] = inner[-1], inner[last]
        else:
            inner[last] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
        if len(header) < 2:
            break
    up = received(sample, msgpack.packb(header), list(sample.frames))
    if up is not None:
        sound = received(sample, msgpack.packb(sample.header), list(sample.frames))
        assert sound is not None and same(up, sound)


@much
@given(st.sampled_from(SAMPLES), st.data())
def test_changed_bytes_of_a_header_are_noticed_or_of_no_consequence(
    sample: Sample, data: st.DataObject
) -> None:
    body = bytearray(msgpack.packb(sample.header))
    for _ in range(data.draw(st.sampled_from([1, 1, 2, 8]))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    up = received(sample, bytes(body), list(sample.frames))
    if up is not None:
        sound = received(sample, msgpack.packb(sample.header), list(sample.frames))
        assert sound is not None and same(up, sound)


def with_frame(sample: Sample, index: int, frame: bytes) -> tuple[bytes, list[bytes]]:
    """Header and frames with one frame replaced, its size and checksum repaired."""
    header, frames = copy.deepcopy(sample.header), list(sample.frames)
    parts = [part for field in header[FIELDS] for part in field[4]]
    parts[index][1], frames[index] = struct.pack(">qQ", len(frame), digest(frame)), frame
    return msgpack.packb(header), frames


@much
@given(st.sampled_from(SAMPLES), st.data())
def test_changed_frames_become_typed_and_checked_values_or_an_error(
    sample: Sample, data: st.DataObject
) -> None:
    """Of every codec: bytes changed, cut off, added; zstd frames, row pointers, columns, bitmaps, ranges."""
    index = data.draw(st.integers(0, len(sample.frames) - 1))
    frame = bytearray(sample.frames[index])
    how = data.draw(st.sampled_from(["bytes", "bytes", "cut", "longer"]))
    if how == "cut":
        del frame[data.draw(st.integers(0, len(frame))) :]
    elif how == "longer":
        frame += data.draw(st.binary(min_size=1, max_size=9))
    else:
        for _ in range(data.draw(st.sampled_from([1, 1, 4]))):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    received(sample, *with_frame(sample, index, bytes(frame)))


def unsized(nbytes: int) -> bytes:
    created = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return created.compress(bytes(nbytes)) + created.flush()


BOMBS: dict[str, Callable[[], bytes]] = {
    "declares 1 GB": lambda: b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", 1 << 30) + bytes(4),
    "declares 2^63": lambda: b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 63) + bytes(4),
    "is 256 MB": lambda: zstandard.compress(bytes(1 << 28))[: 1 << 14],
    "declares nothing": lambda: unsized(1 << 26)[: 1 << 14],
    "wants a large window": lambda: b"\x28\xb5\x2f\xfd\x00\xf8" + bytes(8),
    "is skipped": lambda: b"\x50\x2a\x4d\x18" + struct.pack("<I", 2**32 - 1),
}


def compressed_parts() -> Iterator[tuple[Sample, int]]:
    for sample in SAMPLES:
        parts = [(f[1], p) for f in sample.header[FIELDS] for p in f[4]]
        for i, (name, _) in enumerate(parts):
            if name.partition(":")[0] in ("zstd", "delta+zstd", "bitmap", "best", "topk"):
                yield sample, i


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_zstd_bomb_in_any_part_takes_no_memory(bomb: str) -> None:
    frame, tried = BOMBS[bomb](), 0
    for sample, index in compressed_parts():
        body, frames = with_frame(sample, index, frame)
        tracemalloc.start()
        try:
            assert received(sample, body, frames) is None
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2**20
        tried += 1
    assert tried > 10


@pytest.mark.parametrize("rows", [21, 2**31, 2**62, 2**63 - 1])
def test_a_shape_bomb_is_refused_by_the_set_up_s_bound(rows: int) -> None:
    for sample in SAMPLES:
        for i, field in enumerate(sample.header[FIELDS]):
            if field[0] in ("logits", "inputs", "weights", "owners"):
                header = copy.deepcopy(sample.header)
                shape = header[FIELDS][i][3]
                header[FIELDS][i][3] = struct.pack(">q", rows) + shape[8:]
                assert received(sample, msgpack.packb(header), list(sample.frames)) is None


def test_a_lossy_codec_on_integers_is_refused_by_the_receiver_too() -> None:
    sample = next(s for s in SAMPLES if s.header[FIELDS][8][2] == "u8")
    codecs = sample.codecs | {"inputs": "bf16"}
    header = copy.deepcopy(sample.header)
    assert header[FIELDS][8][0] == "inputs"
    header[FIELDS][8][1] = "bf16"
    index = sum(len(f[4]) for f in header[FIELDS][:8])
    body, frames = with_frame(Sample(codecs, header, sample.frames), index, bytes(70))
    envelope = unpack([struct.pack(">Q", xxhash.xxh3_64_intdigest(body)) + body, *frames], "here")
    with pytest.raises(WireError, match=r"here: field 'inputs'.*floating-point fields only"):
        decode(Up, envelope, codecs, DIMS, "here", REFS, LAYOUT)
