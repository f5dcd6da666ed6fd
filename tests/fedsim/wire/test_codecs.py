"""Codecs: exact where they say so, rounded by as much as they say, of sizes known beforehand."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.learning.params import Layout, Slice
from fedsim.seeds import RandomStream
from fedsim.wire.codecs import CODECS, Spec, codec, pack_or_dense, raw_bytes, unpack_checked
from fedsim.wire.schema import DTYPES

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=60)
HALF_UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11}
"""Largest relative error of rounding to nearest with 8 and with 11 bits of precision."""

NAMES = sorted(
    f"{f.name}:0.3" if f.fraction or f.step else f"{f.name}:4" if f.bits else f.name for f in CODECS.values()
)
LOSSY = [n for n in NAMES if codec(n).lossy]
ONE_SIGN = [n for n in NAMES if codec(n).kinds == {"precision", "curvature"}]
CHECKED = [n for n in NAMES if codec(n).kinds is not None]
"""Those that merge values, so that a bad one could hide."""


def spec_of(x: Tensor, layout: Layout | None = None) -> Spec:
    """With a precision of 1 and a stream, for codecs that need them."""
    scale = torch.ones_like(x, dtype=torch.float32)
    return replace(Spec.of(tuple(x.shape), x.dtype, layout), scale=scale, stream=RandomStream(0, "codec"))


def packed(name: str, x: Tensor, ref: Tensor | None = None, spec: Spec | None = None) -> Any:
    parts = codec(name).pack(x, spec or spec_of(x), torch.zeros_like(x) if ref is None else ref)
    assert parts is not None
    return tuple((layer, memoryview(bytes(data))) for layer, data in parts)


def round_trip(name: str, x: Tensor, ref: Tensor | None = None, spec: Spec | None = None) -> Tensor:
    ref = torch.zeros_like(x) if ref is None else ref
    return unpack_checked(name, packed(name, x, ref, spec), spec or spec_of(x), "test", ref)


@st.composite
def dense_tensors(draw: Any) -> Tensor:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("name", ["dense", "zstd"])
@fixed
@given(x=dense_tensors())
def test_lossless_codecs_are_exact_bit_for_bit(name: str, x: Tensor) -> None:
    selected, parts = pack_or_dense(codec(name), x, spec_of(x))
    back = unpack_checked(selected, parts, spec_of(x), "x")
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


def test_half_overflows_above_65504_and_bfloat_does_not() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e5])
    assert round_trip("f16", x).tolist() == [65504.0, 65504.0, math.inf, -math.inf]
    assert round_trip("bf16", x).isfinite().all()


# ---- what all of them have in common


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3), (3, 0, 2)])
def test_sizes_are_within_the_bounds(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, float(not name.startswith("topk")), dtype=dtype)
    bounds, parts = codec(name).bounds(spec_of(x)), packed(name, x)
    assert [layer for layer, _ in parts] == [b.layer for b in bounds]
    assert all(b.least <= data.nbytes <= b.most for b, (_, data) in zip(bounds, parts, strict=True))
    back = round_trip(name, x)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert ((back - x).abs() <= (0.15 if name.startswith("sigma") else 0)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 100, 10_000, 1_000_000])
def test_a_part_has_at_most_the_dense_bytes_and_a_constant(name: str, count: int) -> None:
    for bound in codec(name).bounds(Spec.of((count,), torch.float32)):
        assert bound.most <= 4 * count + 100
        assert bound.least == bound.most or not name.startswith(("csr", "log8", "bf16", "f16", "dense"))


@pytest.mark.parametrize("name", NAMES)
def test_lossy_says_whether_values_change(name: str) -> None:
    x = torch.tensor([1 / 3, math.pi, 1e-3, 0.7, 2 / 7, 1e-2, 11 / 3])
    assert torch.equal(round_trip(name, x), x) is not codec(name).lossy


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("off", [-6, -1, 1, 6])
def test_parts_of_another_size_are_refused(name: str, off: int) -> None:
    """Of fixed size: any other; of variable size: above the bound, and below the side data."""
    spec, parts = Spec.of((60,), torch.float32), packed(name, torch.rand(60))
    for i, (layer, least, most) in enumerate(codec(name).bounds(spec)):
        size = max(0, least + off) if off < 0 else most + off
        if off < 0 and not least:
            continue
        forged = (*parts[:i], (layer, memoryview(bytes(size))), *parts[i + 1 :])
        demanded = f"{most}" if least == most else f"{least} to {most}"
        with pytest.raises(
            WireError, match=f"x: {size} bytes of {layer} where the layout demands {demanded}"
        ):
            unpack_checked(name, forged, spec, "x", torch.zeros(60))


@pytest.mark.parametrize("name", NAMES)
def test_another_number_of_parts_or_another_layer_is_refused(name: str) -> None:
    spec, parts = Spec.of((6,), torch.float32), packed(name, torch.rand(6))
    for wrong in ((), (*parts, parts[0])):
        with pytest.raises(
            WireError,
            match=f"x: {len(wrong)} frames where codec '{name}' sends {len(parts)}".replace("+", r"\+"),
        ):
            unpack_checked(name, wrong, spec, "x")
    with pytest.raises(WireError, match="x: a part of 'rows' where"):
        unpack_checked(name, (("rows", parts[0][1]), *parts[1:]), spec, "x")


@pytest.mark.parametrize("name", [*LOSSY, "delta+zstd"])
def test_codecs_of_floats_refuse_bytes(name: str) -> None:
    with pytest.raises(UsageError, match="floating-point fields only"):
        codec(name).pack(torch.zeros(3, dtype=torch.uint8), ref=torch.zeros(3))


def test_every_codec_says_where_it_fits() -> None:
    assert ONE_SIGN == ["best:0.3", "bitmap:0.3", "csr:0.3", "log8", "ratio:0.3"]
    assert {n for n in NAMES if codec(n).kinds == {"mean"}} == {"sigma:0.3"}
    assert {n for n in NAMES if codec(n).kinds == {"mean", "delta", "gradient"}} == {"qsgd:4"}
    assert {n for n in NAMES if codec(n).kinds == {"delta", "gradient"}} == {"topk:0.3"}
    assert all((codec(n).kinds is None) == (not codec(n).why) for n in NAMES)


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(WireError, match="3 values where the layout has 4"):
        Spec.of((3,), torch.float32, Layout.vector(4))


# ---- names


def test_an_unknown_codec_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown codec 'dence'; did you mean 'dense'"):
        codec("dence")
    with pytest.raises(UsageError, match="unknown codec 'crs'; did you mean 'csr:p'"):
        codec("crs:0.1")


@pytest.mark.parametrize("name", ["csr", "csr:0", "csr:1.1", "csr:nan", "csr:1:2"])
def test_a_fraction_is_above_0_and_at_most_1(name: str) -> None:
    with pytest.raises(
        UsageError, match=f"codec '{name}': write csr:p, the fraction to keep, 0 < p <= 1, such as csr:0.1"
    ):
        codec(name)


def test_a_fraction_has_one_spelling_on_the_wire() -> None:
    assert codec("csr:.10").name == codec("csr:1e-1").name == "csr:0.1"
    assert all(codec(n).name == n for n in NAMES)


# ---- dense where that is smaller


@pytest.mark.parametrize(("name", "x"), [
    ("csr:0.6", torch.rand(1000)),
    ("bitmap:0.5", torch.rand(3)),
    ("topk:0.5", torch.rand(3)),
    ("zstd", torch.frombuffer(bytearray(Random(0).randbytes(2000)), dtype=torch.float32)),
    ("log8", torch.ones(2)),
    ("best:0.1", torch.ones(1)),
])  # fmt: skip
def test_what_would_not_shrink_is_sent_dense(name: str, x: Tensor) -> None:
    selected, parts = pack_or_dense(codec(name), x, spec_of(x))
    assert selected == "dense"
    assert torch.equal(unpack_checked(selected, parts, spec_of(x), "x").nan_to_num(), x.nan_to_num())


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("dense", "delta+zstd")])
def test_what_shrinks_is_not(name: str) -> None:
    x = torch.arange(1.0, 1001)
    selected, parts = pack_or_dense(codec(name), x, spec_of(x))
    assert selected == name and sum(data.nbytes for _, data in parts) <= 4000


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_the_receiver_must_see_are_sent_dense(name: str, bad: float) -> None:
    x = torch.arange(1.0, 1001)
    x[5] = bad
    assert pack_or_dense(codec(name), x, spec_of(x))[0] == "dense"


@pytest.mark.parametrize("name", [n for n in ONE_SIGN if n not in ("log8", "ratio:0.3")])
@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_the_mean_hides_no_value_that_is_not_positive(name: str, bad: float) -> None:
    x = torch.arange(1.0, 1001)
    x[5] = bad
    assert pack_or_dense(codec(name), x, Spec.of((1000,), torch.float32, positive=True))[0] == "dense"
    assert pack_or_dense(codec(name), x, Spec.of((1000,), torch.float32))[0] == name


# ---- log8

LAYERS = Layout(
    (
        *(Slice("w", (40, 20), 0, 800), Slice("b", (40,), 800, 40), Slice("none", (0,), 840, 0)),
        Slice("c", (1,), 840, 1),
    )
)


def layered(seed: int, spread: float) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.exp(spread * torch.randn(LAYERS.size, generator=draws))


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 4.0])
@pytest.mark.parametrize("zeros", [False, True])
def test_log8_keeps_zeros_and_ends_and_its_error(spread: float, zeros: bool) -> None:
    x = layered(1, spread)
    if zeros:
        x[::3] = 0
    back = round_trip("log8", x, spec=Spec.of((LAYERS.size,), torch.float32, LAYERS))
    assert torch.equal(back == 0, x == 0)
    for s in LAYERS.slices:
        some = x[s.offset : s.offset + s.size]
        result, some = back[s.offset : s.offset + s.size][some > 0], some[some > 0]
        if not len(some):
            continue
        hi = float(some.max())
        lo = max(float(some.min()), 1e-9 * hi)
        bound = (hi / lo) ** (1 / (508 if zeros else 510)) - 1
        exact = some >= lo
        assert float(((result - some) / some)[exact].abs().max()) <= bound + 1e-6 and bound < 0.042
        assert float(result.max()) == hi and float(result.min()) == pytest.approx(lo)


def test_log8_has_no_denormal_level_above_its_smallest() -> None:
    """A thread that flushes denormals to zero must decode the same numbers."""
    x = torch.tensor([2.0**-149, 2.0**-130, 1e-37, 1e-36])
    back = round_trip("log8", x)
    assert back[:2].tolist() == [2.0**-126] * 2 and float(back[3]) == float(x[3])


@pytest.mark.parametrize("zeros", [0, 1])
def test_log8_raises_all_positive_values_of_a_denormal_layer_to_its_largest(zeros: int) -> None:
    x = torch.tensor([0.0] * zeros + [2.0**-149, 2.0**-140, 2.0**-127])
    assert round_trip("log8", x).tolist() == [0.0] * zeros + [2.0**-127] * 3


@pytest.mark.parametrize("ends", [(2.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (0.5, -1.0), (-2.0, 1.0)])
def test_log8_refuses_an_impossible_range(ends: tuple[float, float]) -> None:
    data = torch.tensor(ends).numpy().tobytes() + bytes(10)
    with pytest.raises(WireError, match="x: a logarithmic range from"):
        unpack_checked("log8", (("values", memoryview(data)),), Spec.of((10,), torch.float32), "x")


@fixed
@given(st.lists(st.floats(0, float(torch.finfo(torch.float32).max), width=32), min_size=1, max_size=50))
def test_log8_of_anything_that_is_not_negative(values: list[float]) -> None:
    x = torch.tensor(values)
    back = round_trip("log8", x)
    assert back.isfinite().all() and torch.equal(back == 0, x == 0)
    assert float(back.max()) == float(x.max())
    normal = x >= max(1e-9 * float(x.max()), 2.0**-126)
    assert bool((((back - x).abs() / x)[normal] < 0.042).all())
