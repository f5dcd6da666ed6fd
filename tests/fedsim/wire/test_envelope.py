"""Envelopes: every bit covered, every size known beforehand, every refusal a WireError."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.wire.envelope import (
    MAX_HEADER,
    VERSION,
    Envelope,
    FieldHeader,
    Header,
    PartHeader,
    blob,
    decode,
    digest,
    encode,
    pack,
    unpack,
)
from fedsim.wire.header import read_header
from fedsim.wire.schema import (
    Curvature,
    Delta,
    Dual,
    FieldKind,
    Flag,
    Gradient,
    Mean,
    Precision,
    Scalar,
    Shift,
    Statistic,
    check_values,
    map_tensors,
    schema,
)

ROOT = Path(__file__).parents[3]
VECTOR = (
    "14fb5d4ddf4e209d9503a675706c6f6164a172c440000000000000000100000000000000020000000000000001000000"
    "000000000300000000000000010000000000000004000000000000000500000000000000099195a46d65616ea564656e"
    "7365a3663332c40800000000000000029192a676616c756573c4100000000000000008c77b3abb6f87acd9"
)
fixed = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
DIMS = {"P": 5, "N": 3, "C": 2}


@dataclass(frozen=True)
class Every:
    """One field of every kind and every dtype."""

    mean: Mean
    precision: Precision
    dual: Dual
    shift: Shift
    delta: Delta
    gradient: Gradient
    curvature: Curvature
    statistic: Statistic
    logits: Annotated[Tensor, FieldKind("logits", ("N", "C"))]
    inputs: Annotated[Tensor, FieldKind("inputs", ("N", "C"), dtype="u8")]
    sums: Annotated[Tensor, FieldKind("statistic", ("C",), dtype="f64")]
    loss: Scalar
    started: Flag


@dataclass(frozen=True)
class Up:
    mean: Mean
    precision: Precision
    loss: Scalar
    started: Flag


@dataclass(frozen=True)
class ScalarPrecision:
    mean: Mean
    precision: Annotated[float, FieldKind("precision", (), positive=True, dtype="f64")]


def of_bits(draw: Callable[[Any], Any], name: str) -> Any:
    """A value of the field with random bits: NaN payloads, infinities, -0.0 and denormals included."""
    field = next(f for f in schema(Every) if f.name == name)
    data = bytearray(draw(st.binary(min_size=field.dense_bytes(DIMS), max_size=field.dense_bytes(DIMS))))
    if field.python is bool:
        return bool(data[0] & 1)
    if field.python is float:
        return struct.unpack("<d", data)[0]
    dtype = {"f32": torch.float32, "f64": torch.float64, "u8": torch.uint8}[field.kind.dtype]
    return torch.frombuffer(data, dtype=dtype).reshape(field.shape(DIMS))


@st.composite
def every(draw: Callable[[Any], Any]) -> Every:
    return Every(**{f.name: of_bits(draw, f.name) for f in fields(Every)})


def bits(value: Any) -> bytes:
    """What a value is, NaN payload and sign of zero included."""
    if isinstance(value, Tensor):
        return bytes(value.contiguous().numpy().tobytes())
    return struct.pack("<d", value)


def up(p: int = 5) -> Up:
    return Up(torch.arange(float(p)), torch.arange(float(p)) + 0.5, 1.25, True)


def envelope_of(
    message: object, codecs: dict[str, str] | None = None, dims: dict[str, int] = DIMS
) -> Envelope:
    payload = encode(message, codecs or {}, dims)
    return pack(Header(VERSION, "upload", "run", 1, 7, 1, 3, 6, 12, payload.fields), payload.frames)


def frames_of(envelope: Envelope) -> list[bytes]:
    return [envelope.head, *(bytes(memoryview(f)) for f in envelope.frames)]


def received(frames: Sequence[bytes], codecs: dict[str, str] | None = None) -> Up:
    """All that a receiver does, from frames to a message that an algorithm may see."""
    message = decode(Up, unpack(frames, "here"), codecs or {}, DIMS, "here")
    check_values(message, "here")
    return message


def repacked(body: bytes) -> bytes:
    """A header frame with a valid checksum: what a hostile or foreign sender can make."""
    return struct.pack(">Q", xxhash.xxh3_64_intdigest(body)) + body


def changed(envelope: Envelope, index: int, **changes: Any) -> list[bytes]:
    """The frames of `envelope` with one field's header changed and everything sealed again."""
    headers = list(envelope.header.fields)
    headers[index] = msgspec.structs.replace(headers[index], **changes)
    header = msgspec.structs.replace(envelope.header, fields=tuple(headers))
    return frames_of(pack(header, envelope.frames))


# ---- round trips


@fixed
@given(every())
def test_every_kind_and_dtype_comes_back_bit_for_bit(message: Every) -> None:
    envelope = unpack(frames_of(envelope_of(message)), "here")
    back = decode(Every, envelope, {}, DIMS, "here")
    for f in fields(Every):
        sent, got = getattr(message, f.name), getattr(back, f.name)
        assert type(got) is type(sent)
        assert bits(got) == bits(sent), f.name
        if isinstance(sent, Tensor):
            assert (got.shape, got.dtype) == (sent.shape, sent.dtype)


def test_float64_sums_become_float32_on_the_wire() -> None:
    exact = torch.tensor([1 / 3, 1e-50, 1e300, -0.0, 7.0], dtype=torch.float64)
    mean = decode(Up, envelope_of(replace(up(), mean=exact)), {}, DIMS, "here").mean
    assert mean.dtype == torch.float32
    assert bits(mean) == bits(exact.float())


def test_tensors_that_do_not_lie_in_one_piece_are_sent_in_order() -> None:
    strided = torch.arange(10.0)[::2]
    back = decode(Up, envelope_of(replace(up(), mean=strided)), {}, DIMS, "here")
    assert back.mean.tolist() == [0, 2, 4, 6, 8]


def test_a_model_without_parameters_has_empty_frames() -> None:
    envelope = unpack(frames_of(envelope_of(up(0), dims={"P": 0})), "here")
    assert envelope.sizes[1:] == [0, 0, 8, 1]
    assert decode(Up, envelope, {}, {"P": 0}, "here").mean.shape == (0,)


@dataclass(frozen=True)
class Labelled:
    mean: Annotated[Tensor, FieldKind("mean", ("N",))]
    labels: Annotated[Tensor, FieldKind("labels", ("M", "M"), dtype="u8")]


def test_blobs_and_tensors_of_other_shapes_open() -> None:
    names, data = blob("hello", b"{}")
    assert unpack(frames_of(pack(Header(VERSION, "hello", "", fields=names), data)), "x").frames == (b"{}",)
    payload = encode(Labelled(torch.ones(3), torch.zeros((2, 2), dtype=torch.uint8)), {}, {"N": 3, "M": 2})
    head = Header(VERSION, "evaluate", "", fields=payload.fields)
    envelope = unpack(frames_of(pack(head, payload.frames)), "x")
    described = [(f.name, f.dtype, f.shape) for f in envelope.header.fields]
    assert described == [("mean", "f32", (3,)), ("labels", "u8", (2, 2))]
    assert envelope.sizes[1:] == [12, 4]


def test_decoded_tensors_share_the_received_buffer() -> None:
    frames = [bytearray(f) for f in frames_of(envelope_of(up()))]
    message = decode(Up, unpack([memoryview(f) for f in frames], "here"), {}, DIMS, "here")
    struct.pack_into("<f", frames[1], 8, 99.0)
    assert message.mean.tolist() == [0, 1, 99, 3, 4]
    packed_envelope = frames_of(envelope_of(up()))
    decode(Up, unpack(packed_envelope, "here"), {}, DIMS, "here").mean.add_(1)  # a read-only buffer is copied
    assert decode(Up, unpack(packed_envelope, "here"), {}, DIMS, "here").mean[0] == 0


def test_encoding_copies_nothing() -> None:
    message = up()
    payload = encode(message, {}, DIMS)
    assert np.frombuffer(payload.frames[0], np.uint8).ctypes.data == message.mean.data_ptr()


# ---- the header


@fixed
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=5, max_size=5),
    st.lists(st.integers(0, 2**63 - 1), min_size=3, max_size=3),
    st.lists(st.floats(width=32), min_size=5, max_size=5),
)
def test_a_header_has_one_size_whatever_ids_and_values(
    numbers: list[int], counts: list[int], values: list[float]
) -> None:
    payload = encode(replace(up(), mean=torch.tensor(values)), {}, DIMS)
    micros, folds, asked = counts
    header = Header(VERSION, "upload", "run", *numbers, micros, payload.fields, folds, asked)
    envelope = pack(header, payload.frames)
    assert envelope.sizes == envelope_of(up()).sizes
    assert unpack(frames_of(envelope), "here").header == envelope.header


def test_the_header_of_the_documentation_has_these_bytes() -> None:
    """docs/references/bytes.md states this vector."""
    field = FieldHeader("mean", "dense", "f32", (2,), (PartHeader("values", 8, digest(bytes(8))),))
    envelope = pack(Header(VERSION, "upload", "r", 1, 2, 1, 3, 1, 9, (field,), 4, 5), (bytes(8),))
    assert envelope.head.hex() == VECTOR
    page = (ROOT / "docs" / "references" / "bytes.md").read_text()
    assert VECTOR in "".join(page.split())


def text_size(text: str) -> int:
    """Bytes of a short string in msgpack."""
    size = len(text.encode())
    return size + (1 if size < 32 else 2)


def header_size(header: Header) -> int:
    """The closed form of docs/references/bytes.md."""
    size = 8 + 2 + text_size(header.kind) + text_size(header.run) + 2 + 64
    size += 1 if len(header.fields) < 16 else 3
    for f in header.fields:
        size += 1 + sum(map(text_size, (f.name, f.codec, f.dtype))) + 2 + 8 * len(f.shape) + 1
        size += sum(1 + text_size(p.layer) + 18 for p in f.parts)
    return size


def fields_of(count: int) -> tuple[FieldHeader, ...]:
    parts = (PartHeader("values", 1, 2), PartHeader("indices", 3, 4))
    return tuple(FieldHeader(f"field{i}", "best:0.1", "f32", (1,) * (i % 9), parts) for i in range(count))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 64])
@pytest.mark.parametrize("run", ["", "r", "r" * 31, "r" * 32, "r" * 64, "\u00e9" * 20])
def test_the_size_of_a_header_has_a_closed_form(count: int, run: str) -> None:
    header = Header(VERSION, "upload", run, fields=fields_of(count))
    assert len(pack(header).head) == header_size(header)


def test_every_header_within_the_limits_is_read_as_it_was_written() -> None:
    parts = tuple(PartHeader("p" * 64, 2**63 - 1, 2**64 - 1) for _ in range(8))
    fields = tuple(
        FieldHeader(f"{i:02}" + "\u00e9" * 62, "c" * 64, "d" * 64, (2**63 - 1,) * 8, parts[: i % 9])
        for i in range(64)
    )
    low, high = -(2**63), 2**63 - 1
    header = Header(VERSION, "k" * 64, "r" * 64, low, high, low, high, low, high, fields, high, high)
    envelope = pack(header)
    assert len(envelope.head) < MAX_HEADER
    assert read_header(envelope.head, "here") == header


# ---- damage


def test_every_flipped_bit_is_noticed() -> None:
    frames = frames_of(envelope_of(up()))
    for i, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            damaged = bytearray(frame)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError, match=r"^here: "):
                unpack([*frames[:i], bytes(damaged), *frames[i + 1 :]], "here")


@fixed
@given(st.data())
def test_truncated_and_extended_frames_are_noticed(data: st.DataObject) -> None:
    frames = frames_of(envelope_of(up()))
    i = data.draw(st.integers(0, len(frames) - 1))
    cut = frames[i][: data.draw(st.integers(0, len(frames[i]) - 1))]
    longer = frames[i] + data.draw(st.binary(min_size=1, max_size=9))
    for wrong in (cut, longer):
        with pytest.raises(WireError, match=r"^here: "):
            unpack([*frames[:i], wrong, *frames[i + 1 :]], "here")


def test_missing_extra_swapped_and_no_frames_are_noticed() -> None:
    frames = frames_of(envelope_of(up()))
    head, *rest = frames
    swapped = [head, rest[1], rest[0], *rest[2:]]
    for wrong in ([], [head], frames[:-1], [*frames, b""], [*frames, rest[0]], rest, swapped, frames[::-1]):
        with pytest.raises(WireError, match=r"^here: "):
            unpack(wrong, "here")


@fixed
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError, match=r"^here: "):
        unpack(frames, "here")


# ---- an envelope in order that is not what the schema says


ENVELOPE = envelope_of(up())
SOUND = ENVELOPE.header.fields[0]


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        (changed(ENVELOPE, 0, name="men"), "fields .'men'"),
        (changed(ENVELOPE, 0, codec="bf16"), "field 'mean' is encoded as 'bf16'; this run uses 'dense'"),
        (changed(ENVELOPE, 0, dtype="f64"), "has dtype 'f64'"),
        (changed(ENVELOPE, 0, shape=(4,)), r"has shape \(4,\); the model's layout says \(5,\)"),
        (changed(ENVELOPE, 0, parts=(PartHeader("indices", 20, SOUND.parts[0].digest),)), "'indices'"),
    ],
)
def test_a_field_that_is_not_in_the_schema_is_refused(frames: list[bytes], says: str) -> None:
    with pytest.raises(WireError, match=f"^here: .*{says}"):
        received(frames)


def test_a_field_in_two_parts_or_none_is_refused() -> None:
    part = SOUND.parts[0]
    for parts, extra in (((part, part), 1), ((), -1)):
        described = (msgspec.structs.replace(SOUND, parts=parts), *ENVELOPE.header.fields[1:])
        frames = [ENVELOPE.frames[0]] * (1 + extra) + list(ENVELOPE.frames[1:])
        with pytest.raises(WireError, match="frames where codec 'dense' sends 1"):
            received(frames_of(pack(msgspec.structs.replace(ENVELOPE.header, fields=described), frames)))


def test_sizes_come_from_the_layout_and_not_from_the_header() -> None:
    short = memoryview(ENVELOPE.frames[0])[:16]
    field = msgspec.structs.replace(SOUND, parts=(PartHeader("values", 16, digest(short)),))
    header = msgspec.structs.replace(ENVELOPE.header, fields=(field, *ENVELOPE.header.fields[1:]))
    with pytest.raises(WireError, match="16 bytes of values where the layout demands 20"):
        received(frames_of(pack(header, [short, *ENVELOPE.frames[1:]])))


def test_a_flag_has_two_values() -> None:
    described, parts = list(ENVELOPE.header.fields), list(ENVELOPE.frames)
    parts[3] = b"\x02"
    described[3] = msgspec.structs.replace(described[3], parts=(PartHeader("values", 1, digest(parts[3])),))
    header = msgspec.structs.replace(ENVELOPE.header, fields=tuple(described))
    with pytest.raises(WireError, match="'started' is a flag and has the value 2"):
        received(frames_of(pack(header, parts)))


@pytest.mark.parametrize("version", [0, 1, VERSION + 1, -1, 2**63])
def test_another_version_is_refused_by_number(version: int) -> None:
    header = msgspec.structs.replace(ENVELOPE.header, version=version)
    with pytest.raises(WireError, match=f"wire format {version}; this side speaks {VERSION}"):
        unpack(frames_of(pack(header, ENVELOPE.frames)), "here")


def test_encoding_a_tensor_of_the_wrong_shape_names_class_and_field() -> None:
    with pytest.raises(WireError, match=r"Up.mean has shape \(4,\); its kind 'mean' says \(5,\)"):
        encode(replace(up(), mean=torch.zeros(4)), {}, DIMS)
    with pytest.raises(WireError, match=r"Up.loss has shape \(1,\)"):
        encode(replace(up(), loss=torch.zeros(1)), {}, DIMS)  # type: ignore[arg-type]


def test_an_unknown_codec_and_a_codec_on_bytes_are_the_users_fault() -> None:
    with pytest.raises(UsageError, match="unknown codec 'bf15'; did you mean 'bf16'"):
        encode(up(), {"mean": "bf15"}, DIMS)
    with pytest.raises(UsageError, match="floating-point"):
        encode(up(), {"started": "bf16"}, DIMS)


# ---- hostile headers


def array(*parts: bytes) -> bytes:
    return struct.pack(">BH", 0xDC, len(parts)) + b"".join(parts)


def binary(data: bytes) -> bytes:
    return b"\xc4" + bytes([len(data)]) + data


def full(item: bytes, levels: int) -> bytes:
    """Arrays of 64 items each, so many levels deep."""
    return item if levels == 0 else full(array(*[item] * 64), levels - 1)


NOW, TEXT = bytes([VERSION]), b"\xa1a"
NUMBERS = binary(struct.pack(">8q", 1, 1, 1, 1, 1, 0, 0, 0))
START = [NOW, TEXT, TEXT, NUMBERS]
FIELD = b"\x95\xa1n\xa1c\xa1d"
NO_SHAPE, ONE_DIM = binary(b""), binary(struct.pack(">q", 1))
PART = b"\x92\xa1l" + binary(struct.pack(">qQ", 1, 1))
BOMBS = {
    "array32": b"\xdd\xff\xff\xff\xff",
    "map32": b"\xdf\xff\xff\xff\xff",
    "str32": b"\x95" + NOW + b"\xdb\xff\xff\xff\xff",
    "bin32": b"\xc6\xff\xff\xff\xff",
    "ext32": b"\xc9\xff\xff\xff\xff\x01",
    "bin32 for numbers": array(NOW, TEXT, TEXT, b"\xc6\xff\xff\xff\xff", b"\x90"),
    "bin32 for a shape": array(*START, b"\x91" + FIELD + b"\xc6\xff\xff\xff\xff"),
    "map for fields": array(*START, b"\x80"),
    "base64 for numbers": array(NOW, TEXT, TEXT, b"\xd9\x58" + b"A" * 86 + b"==", b"\x90"),
    "numbers one byte long": array(NOW, TEXT, TEXT, binary(bytes(65)), b"\x90"),
    "negative micros": array(NOW, TEXT, TEXT, binary(struct.pack(">8q", 1, 1, 1, 1, 1, 0, 0, -1)), b"\x90"),
    "fields": array(*START, b"\xdd\xff\xff\xff\xff"),
    "array for a shape": array(*START, b"\x91" + FIELD + b"\xdd\xff\xff\xff\xff"),
    "shape of nine sizes": array(*START, b"\x91" + FIELD + binary(bytes(72)) + b"\x90"),
    "parts": array(*START, b"\x91" + FIELD + NO_SHAPE + b"\xdd\xff\xff\xff\xff"),
    "nine parts": array(*START, b"\x91" + FIELD + NO_SHAPE + b"\x99" + PART * 9),
    "part of 17 bytes": array(*START, b"\x91" + FIELD + NO_SHAPE + b"\x91\x92\xa1l" + binary(bytes(17))),
    "field of six items": array(*START, b"\x91\x96\xa1n\xa1c\xa1d" + NO_SHAPE + b"\x90\x01"),
    "65 fields": array(*START, array(*[FIELD + NO_SHAPE + b"\x90"] * 65)),
    "two fields of one name": array(*START, b"\x92" + (FIELD + NO_SHAPE + b"\x90") * 2),
    "long name": array(NOW, b"\xd9\x41" + b"x" * 65, TEXT, NUMBERS, b"\x90"),
    "long name of a field": array(*START, b"\x91\x95\xda\x01\x01" + b"x" * 257),
    "deep": b"\x91" * 65_000,
    "deep in fields": array(*START, b"\x91" * 65_000),
    "deep in the numbers' place": b"\x95" + b"".join(START[:3]) + b"\x91" * 65_000,
    "wide in the version's place": b"\x95" + full(b"\x90", 2) * 15,
    "wide in the parts": b"\x95" + b"".join(START) + b"\x91" + FIELD + NO_SHAPE + full(b"\x90", 2) * 15,
    "wide in a part": b"\x95" + b"".join(START) + b"\x91" + FIELD + NO_SHAPE + b"\x91\x92" + full(b"\x90", 2),
    "empty maps": b"\x80" * (MAX_HEADER - 8),
    "nothing": b"",
    "no utf-8": array(NOW, b"\xa4\xff\xfe\xff\xfe", TEXT, NUMBERS, b"\x90"),
    "utf-8 surrogate": array(NOW, b"\xa3\xed\xa0\x80", TEXT, NUMBERS, b"\x90"),
    "float for int": array(b"\xcb" + struct.pack(">d", 2.0), TEXT, TEXT, NUMBERS, b"\x90"),
    "negative size": array(
        *START, b"\x91" + FIELD + ONE_DIM + b"\x91\x92\xa1l" + binary(struct.pack(">qQ", -1, 1))
    ),
    "surplus": array(*START, b"\x90", b"\x01"),
    "trailing": array(*START, b"\x90") + b"\x00",
}


def test_the_header_that_the_hostile_ones_vary_is_sound() -> None:
    body = array(*START, b"\x91" + FIELD + ONE_DIM + b"\x91" + PART)
    header = read_header(repacked(body), "here")
    assert header.fields == (FieldHeader("n", "c", "d", (1,), (PartHeader("l", 1, 1),)),)


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_header_is_refused_in_little_memory(name: str) -> None:
    frame = repacked(BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=r"^here: "):
            unpack([frame], "here")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**19


@pytest.mark.parametrize("size", [MAX_HEADER + 1, 2**20])
def test_an_oversized_header_is_refused_by_its_size(size: int) -> None:
    frame = repacked(b"\x80" * (size - 8))
    assert len(frame) == size
    with pytest.raises(WireError, match=f"a header of {size} bytes; the limit is {MAX_HEADER}"):
        unpack([frame], "here")


# ---- values


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["mean", "precision"])
def test_values_that_are_not_finite_are_counted_and_named(field: str, bad: float) -> None:
    values = torch.ones(5)
    values[1] = values[3] = bad
    with pytest.raises(WireError, match=f"^here: field '{field}' has 2 of 5 values NaN or Inf"):
        received(frames_of(envelope_of(replace(up(), **{field: values}))))  # type: ignore[arg-type]


def test_opposite_infinities_do_not_cancel_and_large_finite_sums_pass() -> None:
    mixed = torch.tensor([float("inf"), float("-inf"), 0, 0, 0])
    with pytest.raises(WireError, match="2 of 5"):
        received(frames_of(envelope_of(replace(up(), mean=mixed))))
    large = replace(up(), mean=torch.full((5,), 3e38))  # their float32 sum overflows
    assert received(frames_of(envelope_of(large))).mean[0] > 2.9e38


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.5])
def test_a_precision_that_is_not_positive_is_counted_and_named(bad: float) -> None:
    values = torch.ones(5)
    values[2] = bad
    with pytest.raises(WireError, match=r"^here: precision 'precision' is not positive in 1 of 5 entries"):
        received(frames_of(envelope_of(replace(up(), precision=values))))
    with pytest.raises(WireError, match="precision 'precision' is not positive"):
        check_values(ScalarPrecision(torch.ones(5), bad), "here")


def test_overflow_of_a_lossy_codec_is_noticed_by_the_receiver() -> None:
    message = replace(up(), mean=torch.full((5,), 1e6))
    with pytest.raises(WireError, match="'mean' has 5 of 5 values NaN or Inf"):
        received(frames_of(envelope_of(message, {"mean": "f16"})), {"mean": "f16"})


# ---- schemas


def test_a_message_must_be_a_frozen_dataclass_of_kinds() -> None:
    with pytest.raises(UsageError, match="Thawed must be a frozen dataclass"):
        schema(Thawed)
    with pytest.raises(UsageError, match="field 'x' of Bare must be annotated with a kind"):
        schema(Bare)


@dataclass
class Thawed:
    mean: Mean


@dataclass(frozen=True)
class Bare:
    x: Tensor


@dataclass(frozen=True)
class Nested:
    one: Up
    many: tuple[Tensor, ...]
    number: int


def test_map_tensors_reaches_every_tensor_and_nothing_else() -> None:
    nested = Nested(up(), (torch.ones(2), torch.zeros(1)), 3)
    doubled = map_tensors(nested, lambda t: 2 * t)
    assert doubled.one.mean.tolist() == [0, 2, 4, 6, 8]
    assert [t.tolist() for t in doubled.many] == [[2, 2], [0]]
    assert (doubled.number, doubled.one.loss, doubled.one.started) == (3, 1.25, True)
    assert nested.one.mean.tolist() == [0, 1, 2, 3, 4]
