"""States as bytes: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import copy
import math
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Optional

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.wire.schema import Mean
from fedsim.wire.state_file import decode_state, encode_state
from fedsim.wire.state_header import MAGIC, MAX_HEADER

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=80)
DTYPES = (torch.float64, torch.float32, torch.uint8, torch.int64, torch.bool)


@dataclass(frozen=True)
class Leaf:
    x: Tensor
    count: int
    rate: float
    started: bool
    name: str


@dataclass(frozen=True)
class Tree:
    leaf: Leaf
    maybe: Leaf | None
    old_style: Optional[float]  # noqa: UP045 - users may write it
    many: tuple[Leaf, ...]
    tensors: tuple[Tensor, ...]
    pair: tuple[int, str]
    either: Tensor | float
    annotated: Mean


@dataclass(frozen=True)
class Small:
    x: Tensor
    rate: float = 0.0


@dataclass(frozen=True)
class Renamed:
    z: Tensor
    rate: float = 0.0


@dataclass(frozen=True)
class Retyped:
    x: Tensor
    rate: int = 0


@dataclass(frozen=True)
class Longer:
    x: Tensor
    rate: float = 0.0
    more: float = 0.0


@dataclass(frozen=True)
class Reordered:
    rate: float
    x: Tensor


@dataclass(frozen=True)
class Rates:
    rates: tuple[float, ...] = ()
    maybe: float | None = None
    exact: int | float = 0


@dataclass(frozen=True)
class Either:
    item: tuple[Tensor, int] | tuple[Tensor, str]
    after: Tensor


@st.composite
def any_tensor(draw: Any) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape)
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=dtype).reshape(
            shape
        )
    data = bytearray(draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize)))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


leaves = st.builds(
    Leaf, any_tensor(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.text(max_size=5)
)
trees = st.builds(
    Tree,
    leaves,
    st.none() | leaves,
    st.none() | st.floats(),
    st.lists(leaves, max_size=2).map(tuple),
    st.lists(any_tensor(), max_size=3).map(tuple),
    st.tuples(st.integers(0, 9), st.text(max_size=3)),
    any_tensor() | st.floats(),
    any_tensor(),
)


def same(a: Any, b: Any) -> bool:
    """Equal in type, shape and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def copied(value: Any) -> Any:
    """An equal state that shares no memory, its matrices lying in memory in another order."""
    if isinstance(value, Tensor):
        return value.clone() if value.dim() < 2 else value.mT.contiguous().mT
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: copied(getattr(value, f.name)) for f in fields(value)})
    return value


def packed_envelope(header: bytes, tail: bytes = b"", magic: bytes = MAGIC) -> bytes:
    """A state file with a valid checksum around any header."""
    body = struct.pack(">I", len(header)) + header + tail
    return magic + struct.pack(">Q", xxhash.xxh3_64_intdigest(body)) + body


def written(plain: Any, tail: bytes = b"") -> bytes:
    return packed_envelope(msgspec.msgpack.encode(plain), tail)


SMALL = Small(torch.arange(4.0), 0.5)


@fixed
@given(trees)
def test_nested_states_come_back_bit_for_bit(tree: Tree) -> None:
    data = encode_state(tree)
    back = decode_state(Tree, data, "here")
    assert same(back, tree)
    assert encode_state(back) == data


@fixed
@given(trees)
def test_equal_states_have_equal_bytes(tree: Tree) -> None:
    assert encode_state(copied(tree)) == encode_state(tree)


def test_an_int_in_a_floats_place_has_the_bytes_of_the_float() -> None:
    for ints, floats in (
        (Small(SMALL.x, 3), Small(SMALL.x, 3.0)),
        (Rates((1, 2.5), 4), Rates((1.0, 2.5), 4.0)),
    ):
        assert encode_state(ints) == encode_state(floats)
        assert same(decode_state(type(floats), encode_state(ints), "here"), floats)
    assert decode_state(Rates, encode_state(Rates(exact=7)), "here").exact == 7


def test_a_client_may_keep_nothing() -> None:
    assert decode_state(type(None), encode_state(None), "here") is None
    with pytest.raises(WireError, match="NoneType"):
        decode_state(type(None), encode_state(SMALL), "here")


def test_a_union_tries_its_alternatives_from_the_same_tensor() -> None:
    state = Either((torch.ones(3), "x"), torch.zeros(2))
    assert same(decode_state(Either, encode_state(state), "here"), state)


def test_writable_bytes_are_decoded_without_a_copy_and_files_with_one() -> None:
    buffer = bytearray(encode_state(SMALL))
    view = decode_state(Small, buffer, "here").x  # type: ignore[arg-type]
    buffer[-4:] = struct.pack("<f", 9.0)
    assert view.tolist() == [0, 1, 2, 9]
    data = encode_state(SMALL)
    decode_state(Small, data, "here").x.zero_()
    assert data == encode_state(SMALL)


# ---- damage


def test_every_flipped_bit_is_noticed() -> None:
    data = encode_state(SMALL)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match=r"^here: "):
            decode_state(Small, bytes(damaged), "here")


def test_every_truncation_and_extension_is_noticed() -> None:
    data = encode_state(SMALL)
    for wrong in [*(data[:n] for n in range(len(data))), data + b"\0", data + data, b"\0" + data]:
        with pytest.raises(WireError, match=r"^here: "):
            decode_state(Small, wrong, "here")


@pytest.mark.parametrize("kind", [Renamed, Retyped, Longer, Reordered, Tree])
def test_another_class_is_refused(kind: type) -> None:
    with pytest.raises(WireError, match=f"^here: {kind.__name__}"):
        decode_state(kind, encode_state(SMALL), "here")


@fixed
@given(st.binary(max_size=100))
def test_random_bytes_are_refused(data: bytes) -> None:
    for wrong in (data, MAGIC + data, packed_envelope(data), packed_envelope(data, data)):
        with pytest.raises(WireError, match=r"^here: "):
            decode_state(Small, wrong, "here")


@pytest.mark.parametrize(
    "header", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\x80" * 65_536, b"\x81\x91\x91\xc0\xc0", b""]
)
def test_a_hostile_header_is_refused(header: bytes) -> None:
    with pytest.raises(WireError, match=r"^here: "):
        decode_state(Small, packed_envelope(header), "here")


def test_a_header_is_bounded_on_both_sides() -> None:
    """Seventy times as much memory as bytes would be the worst: empty maps."""
    hostile = b"\xdd" + struct.pack(">I", 10**7) + b"\x80" * 10**7
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=r"^here: a header of 10000005 bytes; the limit is 524288"):
            decode_state(Small, packed_envelope(hostile), "here")
        with pytest.raises(WireError, match=r"^here: "):
            decode_state(Small, packed_envelope(b"\x80" * MAX_HEADER), "here")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 96 * 2**20
    with pytest.raises(UsageError, match="keep what is many in a tensor"):
        encode_state(Rates(tuple(map(float, range(60_000)))))


def test_a_truth_value_has_two_values() -> None:
    data = encode_state(Small(torch.tensor([True, False, True])))
    assert decode_state(Small, data, "here").x.tolist() == [True, False, True]
    forged = data[16:-2] + b"\x02\x01"
    digest = struct.pack(">Q", xxhash.xxh3_64_intdigest(forged))
    with pytest.raises(WireError, match=r"Small\.x is not a truth value"):
        decode_state(Small, MAGIC + digest + forged, "here")


ODD: tuple[Any, ...] = (0, -1, 2**61, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, None, True, b"x", "", "f32")
ODD += ("bool", [], [1], {}, {"x": 1}, ["f32", [4]], ["bool", [4]], ["i64", [2]], ["f64", [2**61, 0]])
ODD += (["f32", [0, 2**62]], ["f32", [2**40, 2**40, 0]], ["f32", []], ["f32", [0] * 8], ["u8", [1] * 9])
WHOLE = Leaf(torch.arange(4.0), 3, 0.5, True, "x")
TREE = Tree(
    WHOLE,
    WHOLE,
    1.5,
    (WHOLE, WHOLE),
    (torch.zeros(2, 3), torch.zeros(0, 3)),
    (1, "a"),
    torch.ones(3).double(),
    torch.ones(5),
)


def placements(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in nested lists and maps."""
    if at:
        yield at
    keys = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
    for key in keys:
        yield from placements(value[key], (*at, key))


@settings(fixed, max_examples=600)
@given(st.data())
def test_a_forged_state_is_one_of_its_class_or_refused(data: st.DataObject) -> None:
    """Under a right checksum; what is accepted is whole: it encodes and comes back."""
    sound = encode_state(TREE)
    (length,) = struct.unpack(">I", sound[16:20])
    plain, tail = msgspec.msgpack.decode(sound[20 : 20 + length]), sound[20 + length :]
    for _ in range(data.draw(st.integers(1, 3))):
        ways = list(placements(plain))
        if not ways:
            break
        *way, last = data.draw(st.sampled_from(ways))
        inner = plain
        for key in way:
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[last] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
        else:
            del inner[last]
    tail += bytes(data.draw(st.sampled_from([0, 0, 1, 16, 40])))
    try:
        back = decode_state(Tree, written(plain, tail), "here")
    except WireError as e:
        if not str(e).startswith("here: "):
            raise
        return
    assert same(decode_state(Tree, encode_state(back), "here"), back)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (Small(torch.ones(2, dtype=torch.float16)), "tensor of torch.float16"),
        (Small(torch.ones((1,) * 9)), "9 dimensions"),
        (Small([1.0]), "a list"),  # type: ignore[arg-type]
        (Small(SMALL.x, np.float64(1)), "a float64"),
        (Retyped(SMALL.x, 2**70), "64 bits"),
        (Rates({1.0}), "a set"),  # type: ignore[arg-type]
    ],
)
def test_what_a_state_cannot_hold_is_refused_when_it_is_written(state: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        encode_state(state)
