"""QSGD, the codec of the literature: its rounding is unbiased and within a level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.wire.codecs import Spec, codec
from fedsim.wire.message_context import codec_stream

DRAWS = torch.Generator().manual_seed(0)


def spec(count: int, client: int = 0) -> Spec:
    return replace(Spec.of((count,), torch.float32), stream=codec_stream(1, 2, 1, client))


def round_trip(name: str, x: Tensor, known: Spec, ref: Tensor | None = None) -> tuple[Tensor, int]:
    parts = codec(name).pack(x, known, ref)
    assert parts is not None
    return codec(name).unpack(tuple(data for _, data in parts), known, ref), parts[0][1].nbytes


@pytest.mark.parametrize("b", [2, 4, 8])
@pytest.mark.parametrize("refers", [True, False])
def test_qsgd_is_unbiased_and_off_by_at_most_a_level(b: int, refers: bool) -> None:
    n, clients = 1300, 400
    x = torch.randn(n, generator=DRAWS)
    ref = torch.randn(n, generator=DRAWS) if refers else None
    distance = x if ref is None else x - ref
    decoded = torch.stack([round_trip(f"qsgd:{b}", x, spec(n, k), ref)[0] for k in range(clients)]).double()
    largest = torch.stack([part.abs().max() for part in torch.split(distance, 512)])
    level = largest.repeat_interleave(512)[:n] / (2 ** (b - 1) - 1)
    assert bool(((decoded - x).abs() <= level * (1 + 1e-5)).all())
    # a level's Bernoulli has a deviation of at most 1/2
    assert float(((decoded.mean(0) - x) / level).abs().max()) < 5 * 0.5 / clients**0.5


def test_qsgd_costs_at_most_its_bits_and_each_buckets_largest_value() -> None:
    x = torch.rand(100_000, generator=DRAWS) - 0.5
    for b in (2, 4, 8):
        _, size = round_trip(f"qsgd:{b}", x, spec(100_000))
        assert size <= 100_000 * b / 8 + 4 * 196 + 300


@pytest.mark.parametrize("text", ["qsgd", "qsgd:1", "qsgd:17", "qsgd:2.5"])
def test_bits_are_a_whole_number(text: str) -> None:
    with pytest.raises(UsageError, match="a whole number from 2 to 16"):
        codec(text)


def test_a_level_that_qsgd_does_not_have_is_refused() -> None:
    many = codec("qsgd:8").pack(torch.randn(600, generator=DRAWS), spec(600))
    assert many is not None
    with pytest.raises(WireError, match="an integer above 1"):
        codec("qsgd:2").unpack((many[0][1],), spec(600))
