"""csr is the paper's rule in scipy's arrays; bitmap and best are the same numbers in fewer bytes; topk
keeps magnitudes and leaves zeros."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings, strategies as st
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from fedsim.errors import WireError
from fedsim.learning.params import Layout, Slice
from fedsim.wire.codecs import Part, Spec, codec, unpack_checked

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=80)
SHAPES = ((7, 11), (7,), (3, 2, 5, 5), (), (4, 0), (1,), (0, 6), (20, 1))


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    slices, offset = [], 0
    for i, shape in enumerate(shapes):
        slices.append(Slice(f"layer{i}", shape, offset, math.prod(shape)))
        offset += math.prod(shape)
    return Layout(tuple(slices))


LAYOUT = layout_of(*SHAPES)


def spec(layout: Layout = LAYOUT, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec.of((layout.size,), dtype, layout)


def precision(layout: Layout = LAYOUT, seed: int = 0) -> Tensor:
    return torch.exp(2 * torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)))


def packed(name: str, x: Tensor, label: Spec | None = None) -> tuple[Part, ...]:
    parts = codec(name).pack(x, label or spec())
    assert parts is not None
    return tuple((layer, memoryview(bytes(data))) for layer, data in parts)


def round_trip(name: str, x: Tensor, label: Spec | None = None) -> Tensor:
    return unpack_checked(name, packed(name, x, label), label or spec(), "x")


def by_the_rule(x: Tensor, p: float, layout: Layout = LAYOUT) -> Tensor:
    """As the paper says it, one layer and one entry at a time; the first of equal entries are kept."""
    out = x.double().clone()
    for s in layout.slices:
        layer = out[s.offset : s.offset + s.size]
        order = sorted(range(s.size), key=lambda i: (-float(layer[i]), i))
        rest = order[max(1, round(p * s.size)) :]
        if rest:
            layer[rest] = math.fsum(layer[rest].tolist()) / len(rest)
    return out.float()


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 1.0])
def test_csr_holds_the_arrays_of_scipy(p: float) -> None:
    x = precision()
    (_, indices), (_, values) = packed(f"csr:{p}", x)
    integers, floats = np.frombuffer(indices, np.int32), np.frombuffer(values, np.float32)
    means, floats = floats[: len(SHAPES)], floats[len(SHAPES) :]
    for s, mean in zip(LAYOUT.slices, means, strict=True):
        layer = by_the_rule(x, p)[s.offset : s.offset + s.size].numpy()
        rows = s.shape[0] if len(s.shape) > 1 else 1
        kept = np.sort(np.argsort(-layer, kind="stable")[: max(1, round(p * s.size)) if s.size else 0])
        sparse = np.zeros_like(layer)
        sparse[kept] = layer[kept]
        target = csr_matrix(sparse.reshape(rows, s.size // rows if rows else 6))
        np.testing.assert_array_equal(integers[: rows + 1], target.indptr)
        np.testing.assert_array_equal(integers[rows + 1 :][: target.nnz], target.indices)
        np.testing.assert_array_equal(floats[: target.nnz], target.data)
        assert target.indptr.dtype == target.indices.dtype == np.int32
        rest = np.delete(layer, kept)
        assert (rest == mean).all() and (len(rest) or mean == 0)
        integers, floats = integers[rows + 1 + target.nnz :], floats[target.nnz :]
    assert not len(integers) and not len(floats)


@pytest.mark.parametrize(
    ("p", "total"), [(0.01, 15_556), (0.05, 72_548), (0.1, 143_788), (0.2, 286_276), (0.5, 713_740)]
)
def test_csr_of_the_measured_network_has_the_measured_bytes(p: float, total: int) -> None:
    """docs/references/bytes.md#compressed-sparse-rows: MLP 784-200-100-10."""
    module = nn.Sequential(nn.Linear(784, 200), nn.Linear(200, 100), nn.Linear(100, 10))
    label = spec(Layout.of(module))
    assert sum(b.most for b in codec(f"csr:{p}").bounds(label)) == total
    assert sum(data.nbytes for _, data in packed(f"csr:{p}", precision(label.layout), label)) == total


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_best_rounds_the_kept_values_to_bfloat16(p: float) -> None:
    x = precision()
    exact, best = round_trip(f"csr:{p}", x), round_trip(f"best:{p}", x)
    kept = exact == x
    assert torch.equal(best[kept], x[kept].bfloat16().float())
    assert torch.equal(best[~kept], exact[~kept])
    assert float(((best - exact) / exact).abs().max()) <= 2.0**-8


def test_a_tensor_without_a_layout_is_one_layer_of_its_own_shape() -> None:
    x = torch.arange(1.0, 13).reshape(3, 4)
    (_, indices), _ = packed("csr:0.25", x, Spec.of((3, 4), torch.float32))
    assert np.frombuffer(indices, np.int32).tolist() == [0, 0, 0, 3, 1, 2, 3]


@st.composite
def cases(draw: Any) -> tuple[Layout, Tensor, float]:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=4))
    layout = layout_of(*shapes)
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    few = st.lists(finite, min_size=1, max_size=3)  # many ties
    pool = draw(st.one_of(few, st.lists(finite, min_size=layout.size + 1, max_size=layout.size + 1)))
    draws = draw(st.randoms(use_true_random=False))
    return layout, torch.tensor([draws.choice(pool) for _ in range(layout.size)]), draw(st.floats(0.001, 1))


@fixed
@given(cases())
def test_csr_and_bitmap_follow_the_rule_and_agree_bit_for_bit(case: tuple[Layout, Tensor, float]) -> None:
    layout, x, p = case
    label = spec(layout)
    csr, bitmap = round_trip(f"csr:{p}", x, label), round_trip(f"bitmap:{p}", x, label)
    assert csr.numpy().tobytes() == bitmap.numpy().tobytes()
    target = by_the_rule(x, p, layout)
    torch.testing.assert_close(csr, target, rtol=1e-6, atol=float(x.abs().max()) * 1e-15 if len(x) else 0)
    for s in layout.slices:  # the rule changes no layer's sum
        sums = (float(t[s.offset : s.offset + s.size].double().sum()) for t in (csr, x))
        size = float(x[s.offset : s.offset + s.size].double().abs().sum())
        assert abs(next(sums) - next(sums)) <= 1e-6 * size


# ---- topk


def of_largest_magnitude(x: Tensor, p: float, layout: Layout = LAYOUT) -> Tensor:
    """The rule of topk, one layer and one entry at a time."""
    out = torch.zeros_like(x)
    for s in layout.slices:
        layer = x[s.offset : s.offset + s.size]
        order = sorted(range(s.size), key=lambda i: (-abs(float(layer[i])), i))
        kept = [s.offset + i for i in order[: max(1, round(p * s.size))]]
        out[kept] = x[kept]
    return out


@fixed
@given(cases())
def test_topk_follows_its_rule_bit_for_bit(case: tuple[Layout, Tensor, float]) -> None:
    layout, x, p = case
    label = spec(layout)
    back = round_trip(f"topk:{p}", x, label)
    assert back.numpy().tobytes() == of_largest_magnitude(x, p, layout).numpy().tobytes()
    second = round_trip(f"topk:{p}", back, label)
    assert torch.equal(second, back)


def test_topk_sends_no_means() -> None:
    """Values only: 300 kept of 1000, and nothing beside them."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(6))
    label = Spec.of((1000,), torch.float32)
    indices, values = codec("topk:0.3").bounds(label)
    assert values.least == 0 and values.most <= 4 * 300 + 100 and indices.most <= 125 + 100
    float64 = round_trip("topk:0.3", x.double(), Spec.of((1000,), torch.float64))
    assert float64.dtype == torch.float64 and int((float64 != 0).sum()) == 300


# ---- what is not canonical is refused


def forged_csr(indices: list[int]) -> tuple[Part, ...]:
    """Of a layer of 2 rows and 3 columns, p = 0.5: 3 pointers and 3 columns."""
    data = np.array(indices, dtype=np.int32).tobytes()
    return (("indices", memoryview(data)), ("values", memoryview(struct.pack("<4f", 1, 2, 3, 4))))


TABLE = Spec.of((2, 3), torch.float32)


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([1, 2, 3, 0, 1, 0], "row pointers of layer '' do not count its 3 entries"),
        ([0, 2, 4, 0, 1, 0], "row pointers"),
        ([0, 2, 3, 0, 3, 0], "columns of layer '' outside its 3"),
        ([0, 2, 3, 1, 0, 0], "columns of layer '' do not ascend"),
    ],
)
def test_csr_that_is_not_canonical_is_refused(indices: list[int], says: str) -> None:
    good = unpack_checked("csr:0.5", forged_csr([0, 2, 3, 0, 1, 0]), TABLE, "x")
    assert good.tolist() == [[2, 3, 1], [4, 1, 1]]
    with pytest.raises(WireError, match=f"x: .*{says}"):
        unpack_checked("csr:0.5", forged_csr(indices), TABLE, "x")


def bits(*numbers: int) -> memoryview:
    return memoryview(zstandard.compress(bytes(numbers), 3))


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        (bits(0b0100_0111), "bits set behind the last position"),
        (bits(0b0000_0011), "2 kept entries in layer ''; p says 3"),
        (bits(7, 0), "a zstd frame declares 2 bytes; the layout demands 1"),
        (memoryview(b""), "a damaged zstd frame"),
        (memoryview(bytes(bits(7)) + b"0"), "a damaged zstd frame"),
    ],
)
def test_bitmaps_that_say_something_else_are_refused(indices: memoryview, says: str) -> None:
    x = torch.tensor([[5.0, 4, 3], [1, 1, 1]])
    for name in ("bitmap:0.5", "topk:0.5"):
        (_, good), values = packed(name, x, TABLE)
        assert good == bits(7)
        with pytest.raises(WireError, match=f"x: {says}"):
            unpack_checked(name, (("indices", indices), values), TABLE, "x")


@pytest.mark.parametrize("name", ["bitmap:0.1", "best:0.1", "topk:0.1"])
def test_values_of_another_number_are_refused(name: str) -> None:
    indices, (_, values) = packed(name, precision())
    side = 0 if name.startswith("topk") else 4 * len(SHAPES)
    other = memoryview(bytes(values[:side]) + zstandard.compress(bytes(400), 3))
    with pytest.raises(WireError, match="x: a zstd frame declares 400 bytes; the layout demands"):
        unpack_checked(name, (indices, ("values", other)), spec(), "x")


@fixed
@given(
    st.sampled_from(["csr:0.2", "bitmap:0.2", "best:0.2", "topk:0.2"]),
    st.integers(0, 10**6),
    st.integers(1, 255),
)
def test_a_changed_byte_gives_another_tensor_or_a_wire_error(name: str, where: int, change: int) -> None:
    parts = packed(name, precision())
    i = where % len(parts)
    data = bytearray(parts[i][1])
    data[where % len(data)] ^= change
    forged = (*parts[:i], (parts[i][0], memoryview(data)), *parts[i + 1 :])
    output = "x: "
    try:
        assert unpack_checked(name, forged, spec(), "x").shape == (LAYOUT.size,)
    except WireError as e:
        output = str(e)
    assert output.startswith("x: ")
