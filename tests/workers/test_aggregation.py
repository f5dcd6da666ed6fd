"""How the scalars of a round's uploads become one number each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedsim.wire.schema import Check, Flag, Least, Mean, Norm, Scalar, Total
from workers.coordinator.aggregation import _Scalars

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=60)


@dataclass(frozen=True)
class Part:
    part_loss: Scalar


@dataclass(frozen=True)
class Up:
    mean: Mean
    loss: Scalar
    slack: Least
    capped: Total
    residual: Norm
    check: Check
    flag: Flag
    part: Part | None = None


def up(loss: float, slack: float, capped: float, residual: float) -> Up:
    return Up(torch.ones(2), loss, slack, capped, residual, 7.0, True, Part(99.0))


def summed(*ups: tuple[Up, int]) -> dict[str, float]:
    scalars = _Scalars(Up)
    for each, size in ups:
        scalars.add(each, size)
    return scalars.result()


def test_every_scalar_is_summed_up_as_its_kind_says() -> None:
    results = summed((up(1.0, 0.5, 3.0, 3.0), 10), (up(4.0, -0.25, 2.0, 4.0), 30))
    assert results == {"loss": (10 * 1 + 30 * 4) / 40, "slack": -0.25, "capped": 5.0, "residual": 5.0}


def test_nothing_is_said_of_tensors_flags_checks_and_parts() -> None:
    assert set(summed((up(1, 1, 1, 1), 1))) == {"loss", "slack", "capped", "residual"}


@fixed
@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 4, st.integers(1, 1000)), min_size=1, max_size=6))
def test_any_uploads(values: list[tuple[float, float, float, float, int]]) -> None:
    results = summed(*((up(*four), size) for *four, size in values))
    loss, slack, capped, residual, sizes = zip(*values, strict=True)
    weighted = math.fsum(n * v for n, v in zip(sizes, loss, strict=True)) / sum(sizes)
    assert results["loss"] == pytest.approx(weighted, rel=1e-12, abs=1e-9)
    assert results["slack"] == min(slack)
    assert results["capped"] == pytest.approx(math.fsum(capped), rel=1e-12, abs=1e-9)
    assert results["residual"] == pytest.approx(math.hypot(*residual), rel=1e-12)


def test_equal_sizes_are_the_plain_mean_and_one_upload_is_itself() -> None:
    assert summed((up(1, 0, 0, 0), 5), (up(2, 0, 0, 0), 5))["loss"] == 1.5
    alone = summed((up(0.3, -2.0, 4.0, 0.7), 7))
    assert alone == pytest.approx({"loss": 0.3, "slack": -2.0, "capped": 4.0, "residual": 0.7}, rel=1e-15)
