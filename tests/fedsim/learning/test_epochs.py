"""Batches of a pass over a client's examples, with and without the short last one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.epochs import batches, rows_in_use, run_epochs
from fedsim.learning.solvers.first_order import LocalSGD, LocalTraining, corrected_sgd, minimise
from fedsim.learning.solvers.ivon import IvonTraining, ivon
from fedsim.seeds import RandomStream

N, P = 23, 20
RNG = RandomStream(5, "client.1", 2, 0)


def shard_of(examples: int = N) -> Shard:
    draws = torch.Generator().manual_seed(1)
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)))
    inputs = torch.rand((examples, 4), generator=draws)
    return Shard(net, inputs, torch.randint(4, (examples,), generator=draws), 1.0)


@given(st.integers(1, 300), st.integers(1, 64))
def test_batches_of_a_pass_are_what_drop_last_says(examples: int, size: int) -> None:
    how = LocalTraining(epochs=3, batch_size=size)
    least = replace(how, drop_last=True)
    sizes = [len(part) for part in torch.split(torch.arange(examples), size)]
    assert (batches(how, examples), rows_in_use(how, examples)) == (len(sizes), examples)
    whole = [n for n in sizes if n == size] or sizes
    assert (batches(least, examples), rows_in_use(least, examples)) == (len(whole), sum(whole))
    assert least.steps(examples) == 3 * len(whole)


def test_the_last_batch_is_left_out_of_every_pass_and_of_the_loss() -> None:
    shard, seen = shard_of(), []

    def step(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        seen.append(inputs)
        return [targets.double().mean()]

    loss = run_epochs(shard, step, LocalTraining(epochs=2, batch_size=5, drop_last=True), RNG)
    assert [len(inputs) for inputs in seen] == [5] * 8
    order = RNG.torch("batches")
    for part in (seen[:4], seen[4:]):
        rows = torch.randperm(N, generator=order)[:20]
        assert torch.equal(torch.cat(part), shard.inputs[rows])
    assert loss == pytest.approx(float(shard.targets[rows].double().mean()), rel=1e-6)


def solved(kind: str, shard: Shard, how: dict[str, Any]) -> list[float]:
    start = torch.linspace(-0.5, 0.5, P)
    fit: Any
    if kind == "minimise":
        fit = minimise(shard, start, how=LocalTraining(**how), rng=RNG, round=1)
    elif kind == "corrected":
        zero = torch.zeros(P)
        fit = corrected_sgd(shard, start, how=LocalSGD(**how), rng=RNG, round=1, share=1.0, constant=zero)
    else:
        prior = {"prior_mean": torch.zeros(P), "prior_precision": torch.ones(P), "ess": 20.0}
        fit = ivon(shard, start, how=IvonTraining(**how), rng=RNG, round=1, **prior)  # type: ignore[arg-type]
        return [*fit.solution.mean.tolist(), fit.loss]
    return [*fit.solution.tolist(), fit.loss]


@pytest.mark.parametrize("kind", ["minimise", "corrected", "ivon"])
def test_solvers_differ_only_where_a_short_batch_is_left_out(kind: str) -> None:
    for examples, size, same in ((20, 5, True), (4, 5, True), (N, 5, False)):
        shard = shard_of(examples)
        kept, left = (
            solved(kind, shard, {"epochs": 2, "batch_size": size, "drop_last": drop})
            for drop in (False, True)
        )
        assert (kept == left) is same, (examples, size)
