"""Codecs of masks: what a sample is distributed as, what it costs, and what a receiver refuses."""

from __future__ import annotations

import math
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.learning.params import Layout, Slice
from fedsim.seeds import RandomStream
from fedsim.wire.codecs import Spec, codec, masks, unpack_checked
from fedsim.wire.schema import Probability, check_values

SIZES = (700, 33, 1, 300)
SAMPLES = ("bernoulli", "mrc:4", "mrc:8")


def layout(sizes: tuple[int, ...] = SIZES) -> Layout:
    offsets = np.cumsum((0, *sizes))
    return Layout(
        tuple(Slice(f"l{i}", (n,), int(o), n) for i, (n, o) in enumerate(zip(sizes, offsets, strict=False)))
    )


def spec_of(round: int = 1, sizes: tuple[int, ...] = SIZES) -> Spec:
    spec = Spec.of((sum(sizes),), torch.float32, layout(sizes))
    return replace(spec, stream=RandomStream(7, "codec probability", round, 3))


def probabilities(seed: int, count: int = sum(SIZES)) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def near(p: Tensor, step: float) -> Tensor:
    """q at a small distance from p, as after local training."""
    moved = torch.logit(p.clamp(0.05, 0.95)) + step * torch.randn(
        len(p), generator=torch.Generator().manual_seed(9)
    )
    return torch.sigmoid(moved)


def carried(name: str, q: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Tensor, int]:
    parts = codec(name).pack(q, spec, ref)
    assert parts is not None
    out = unpack_checked(name, parts, spec, "here", ref)
    return out, sum(p.nbytes for _, p in parts)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("refers", [True, False])
def test_what_is_decoded_is_a_mask_with_the_mean_q(name: str, refers: bool) -> None:
    """400 messages: the mean of bernoulli's masks is within 5 standard errors of q in every place; mrc's
    samples lean towards the broadcast, as far as the last test of this file says."""
    p = probabilities(0)
    q, count = near(p, 0.5), 400
    total = torch.zeros_like(q)
    for r in range(count):
        mask, _ = carried(name, q, spec_of(r), p if refers else None)
        assert set(mask.unique().tolist()) <= {0.0, 1.0}
        total += mask
    error = total / count - q
    standard = (q * (1 - q) / count).sqrt()
    if name == "bernoulli":
        assert float((error.abs() / standard).max()) < 5
    assert abs(float(error.mean())) < 4 * float(standard.mean()) / math.sqrt(len(q)) + 0.01
    assert float((error * (q - p)).mean()) > -0.02 * float(((q - p) ** 2).mean()) - 0.004


def test_an_index_costs_about_the_divergence_and_a_mask_its_entropy() -> None:
    sizes = (40_000, 10_000)
    p = probabilities(1, sum(sizes)).clamp(0.05, 0.95)
    q, spec = near(p, 0.3), spec_of(1, sizes)
    kl = float((q * (q / p).log2() + (1 - q) * ((1 - q) / (1 - p)).log2()).sum())
    entropy = float(-(q * q.log2() + (1 - q) * (1 - q).log2()).sum())
    _, drawn = carried("bernoulli", q, spec, p)
    _, index = carried("mrc:8", q, spec, p)
    assert 8 * drawn < 1.05 * entropy + 4_000  # 16 tables
    assert kl < 8 * index < 8 / (8 - masks.SPARE) * 1.3 * kl + 200
    assert index < drawn / 10


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([*SAMPLES, "mrc:3x5", "levels:4"]), st.booleans())
def test_both_ends_have_the_same(seed: int, name: str, refers: bool) -> None:
    """Packing is a function of its arguments, and the number of bytes is within the bounds."""
    p, q, spec = probabilities(seed), probabilities(seed + 1), spec_of(seed)
    q[:5] = torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0])
    ref = p if refers else None
    once, used = carried(name, q, spec, ref)
    again, _ = carried(name, q, spec, ref)
    assert torch.equal(once, again) and float(once.min()) >= 0 and float(once.max()) <= 1
    (bound,) = codec(name).bounds(spec)
    assert bound.least <= used <= bound.most
    if name == "levels:4":
        assert float((once - q).abs().max()) <= 2**-5 + 1e-7
    if name == "mrc:3x5":
        assert (
            torch.equal((5 * once).round(), 5 * once)
            or float((5 * once - (5 * once).round()).abs().max()) < 1e-6
        )


def test_the_chosen_candidate_is_the_one_that_the_sender_saw() -> None:
    for size in (1, 3, 4, 1001):
        for number in (0, 1, 17):
            one = masks._candidate(number, size, 123456789)
            other = masks._drawn(np.full(size, number), size, 123456789)
            assert (one.astype(np.uint64) == other).all()
    many = masks._candidate(5, 100_000, 42).astype(np.float64)
    assert abs(many.mean() / 65536 - 0.5) < 0.005 and abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("name", [*SAMPLES, "levels:6"])
def test_damage_is_refused_or_gives_probabilities(name: str) -> None:
    spec, p = spec_of(), probabilities(0)
    parts = codec(name).pack(near(p, 0.5), spec, p)
    assert parts is not None
    data, draws = bytes(parts[0][1]), np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[draws.integers(len(damaged))] ^= 1 << draws.integers(8)
        if draws.random() < 0.3:
            damaged = damaged[: draws.integers(len(damaged))]
        try:
            out = unpack_checked(name, (("values", memoryview(bytes(damaged))),), spec, "here", p)
        except WireError:
            continue
        assert float(out.min()) >= 0 and float(out.max()) <= 1


def test_a_length_of_no_block_is_refused() -> None:
    spec = spec_of()
    parts = codec("mrc:4").pack(probabilities(1), spec, None)
    assert parts is not None
    for length in (0, masks.LONGEST + 1, 2**32 - 1):
        damaged = bytearray(parts[0][1])
        damaged[:4] = length.to_bytes(4, "little")
        with pytest.raises(WireError, match=r"blocks of|bytes"):
            unpack_checked("mrc:4", (("values", memoryview(bytes(damaged))),), spec, "here", None)


@pytest.mark.parametrize("name", ["mrc:3", "mrc:12", "mrc:6x5", "mrc:12x64"])
def test_a_frame_takes_memory_in_proportion_to_the_dense_field(name: str) -> None:
    """Blocks of one place, as many as the bound admits: no frame is longer than the field is dense. To decode
    it takes at most 24 times the memory of the dense field: 20 to 23 were seen, and 1,733 when all
    bits were held as integers."""
    size = 200_000
    spec = spec_of(1, (size,))
    (bound,) = codec(name).bounds(spec)
    assert bound.most <= spec.dense_bytes
    data = memoryview((1).to_bytes(4, "little") + bytes(bound.most - 4))
    tracemalloc.start()
    with suppress(WireError):  # more samples than fit
        unpack_checked(name, (("values", data),), spec, "here", None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * spec.dense_bytes


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 12), st.sampled_from([0, 1, 7, 8, 9, 65_535, 65_536, 65_537, 131_079]))
def test_indices_survive_in_as_few_bytes_as_they_need(b: int, count: int) -> None:
    indices = np.random.default_rng(b + count).integers(0, 2**b, count)
    data = masks._packed(indices, b)
    assert len(data) == -(-count * b // 8)
    assert (masks._unpacked(memoryview(data), count, b) == indices).all()
    if count * b % 8:
        damaged = bytearray(data)
        damaged[-1] |= 1
        with pytest.raises(WireError, match="behind the last"):
            masks._unpacked(memoryview(bytes(damaged)), count, b)


@dataclass(frozen=True)
class _Message:
    probability: Probability


def test_what_is_no_probability_is_refused() -> None:
    check_values(_Message(torch.tensor([0.0, 0.5, 1.0])), "here")
    for bad in (-1e-3, 1.001):
        with pytest.raises(WireError, match="outside"):
            check_values(_Message(torch.tensor([0.5, bad])), "here")
    for name in ("bernoulli", "mrc:4", "levels:4"):
        assert codec(name).pack(torch.full((sum(SIZES),), 1.5), spec_of(), None) is None


@pytest.mark.parametrize(
    "name", ["mrc", "mrc:2", "mrc:13", "mrc:4x0", "mrc:4x65", "mrc:4+dither", "levels:4x2", "bernoulli:1"]
)
def test_a_codec_that_is_written_wrongly_says_how(name: str) -> None:
    with pytest.raises(UsageError):
        codec(name)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("bernoulli", 0.95, 1.05), ("mrc:4", 0.7, 0.85), ("mrc:8", 0.75, 0.9)]
)
def test_how_far_the_mean_of_the_masks_goes_from_the_broadcast_to_q(
    name: str, least: float, most: float
) -> None:
    """The slope of (mean mask - p) on (q - p), 1 for an exact sample; its standard error is 0.012 here.
    An index of b bits over b - 2 bits of mean KL goes about 0.8 of the way."""
    size = 8_000
    p = probabilities(2, size).clamp(0.05, 0.95)
    q, count = near(p, 0.5), 32
    total = sum((carried(name, q, spec_of(r, (size,)), p)[0] for r in range(count)), start=torch.zeros(size))
    moved = q - p
    slope = float(((total / count - p) * moved).sum() / (moved * moved).sum())
    assert least < slope < most
