"""What a message could have cost: entropy, step, rounding and KL divergence, alone and in whole runs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsim.learning.gaussian import kl_divergence
from fedsim.wire import limits
from fedsim.wire.codecs import sigma
from fedsim.wire.limits import BLOCK
from protocols import find
from tests.support.harness import play, problem_of
from workers.coordinator.aggregation import AggregationThread

FEW = {"up.mean": "sigma:auto", "up.precision": "ratio:0.25", "down.mean": "sigma:0.05+dither+last"}


def gaussian(size: int, seed: int) -> SimpleNamespace:
    draws = torch.Generator().manual_seed(seed)
    mean, precision = torch.randn(size, generator=draws), torch.rand(size, generator=draws) + 0.5
    return SimpleNamespace(mean=mean, precision=precision)


@pytest.mark.parametrize("size", [1, 1000, 2 * BLOCK + 17])
def test_the_divergence_is_that_of_whole_vectors(size: int) -> None:
    up, down = gaussian(size, 0), gaussian(size, 1)
    exact = kl_divergence(up.mean, up.precision, down.mean, down.precision) / math.log(2) / size
    assert limits.divergence(up, down) == pytest.approx(exact, rel=1e-12)
    assert limits.divergence(up, up) == pytest.approx(0, abs=1e-15)


def test_there_is_none_without_a_posterior_on_both_sides() -> None:
    up = gaussian(10, 0)
    for down in (SimpleNamespace(mean=up.mean), gaussian(11, 0), SimpleNamespace(mean=None, precision=1.0)):
        assert limits.divergence(up, down) is None


def measured(tmp_path: Path, algorithm: str, **changes: Any) -> list[Any]:
    run = play(problem_of(find(algorithm), None, **changes), tmp_path / "run")
    return [line.get("limits") for line in run.metrics]


def test_a_run_measures_one_upload_a_round_and_its_broadcast(tmp_path: Path) -> None:
    first, *rounds = measured(tmp_path, "fedlap_cov", codecs=FEW, rounds=4)
    assert first is None and len(rounds) == 4
    for line in rounds:
        assert set(line) == {"down", "up", "kl"} and line["kl"] > 0
        assert line["up"]["mean"]["rounding"] <= 1.001 * sigma.SHARE
        assert line["down"]["mean"]["step"] == 0.05 and "rounding" not in line["down"]["mean"]
        for numbers in (line["up"]["mean"], line["up"]["precision"], line["down"]["mean"]):
            assert 0 <= numbers["entropy"] <= numbers["bits"] < 32


def test_unlike_clients_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients, measure = list[int](), AggregationThread._limits

    def watched(self: AggregationThread, envelope: Any, *more: Any) -> dict[str, Any]:
        clients.append(envelope.header.client)
        return measure(self, envelope, *more)

    monkeypatch.setattr(AggregationThread, "_limits", watched)
    measured(tmp_path, "fedlap_cov", codecs=FEW, rounds=4, clients=3)
    assert clients == [1, 2, 0, 1]


def test_messages_without_limits_add_nothing_to_a_line(tmp_path: Path) -> None:
    assert measured(tmp_path, "fedavg") == [None] * 3
    dense = measured(tmp_path / "dense", "fedlap_cov")
    assert all(set(line) == {"kl"} for line in dense[1:])
