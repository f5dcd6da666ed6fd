"""FedIvon's local solver is the package ivon-opt: our own IVON bit for bit where both apply."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.params import Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers.ivon import IvonFit, IvonTraining, _Ivon, ivon
from fedsim.learning.solvers.ivon_opt import ivon_opt
from fedsim.seeds import RandomStream, seeded_torch

N, DELTA, ESS = 26, 2.0, 40.0
HOW = IvonTraining(epochs=6, batch_size=6, lr=0.05, h0=0.05, beta2=0.98)
RNG = RandomStream(3, "ivon-opt-test", 1, 0)


@pytest.fixture
def shard() -> Shard:
    with seeded_torch(0):
        net = Net(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)))
        return Shard(net, torch.randn(N, 7), torch.randint(5, (N,)), 1.0)


def own(shard: Shard, start: Tensor, how: IvonTraining, h0: float | None, **more: object) -> IvonFit:
    prior = torch.zeros_like(start, dtype=torch.float64)
    supplied = {"rng": RNG, "round": 1, "prior_mean": prior, "prior_precision": prior + DELTA, "ess": ESS}
    return ivon(shard, start, how=how, h0=h0, **(supplied | more))


@pytest.mark.parametrize("samples", [1, 3])
def test_it_is_our_ivon_bit_for_bit(shard: Shard, samples: int) -> None:
    how, start = replace(HOW, samples=samples), shard.net.snapshot()
    one = own(shard, start, how, HOW.h0)
    two = ivon_opt(
        shard,
        start,
        curvature=torch.full_like(start, HOW.h0),
        how=how,
        rng=RNG,
        round=1,
        delta=DELTA,
        ess=ESS,
    )
    assert torch.equal(two.solution.mean, one.solution.mean)
    assert torch.equal(ESS * (two.solution.curvature + DELTA / ESS), one.solution.precision)
    assert two.loss == one.loss
    assert one.carried is not None and two.carried is not None
    assert torch.equal(two.carried.momentum, one.carried.momentum)
    assert two.carried.steps == one.carried.steps == 30

    # a second task: momentum goes on and h starts anew, as in ivon_admm
    later = {"rng": replace(RNG, round=2), "round": 2}
    again = own(shard, one.solution.mean, how, None, moments=one.carried, **later)
    zero = torch.zeros_like(start)
    also = ivon_opt(
        shard, two.solution.mean, curvature=zero, how=how, delta=DELTA, ess=ESS, moments=two.carried, **later
    )
    assert torch.equal(also.solution.mean, again.solution.mean)
    assert also.carried is not None and also.carried.steps == 60


def test_a_curvature_per_coordinate_is_taken_as_it_is(shard: Shard) -> None:
    """Our step with h set to a vector, fed the same noise and batches."""
    start = shard.net.snapshot()
    h = torch.rand(len(start), generator=torch.Generator().manual_seed(1))
    prior = torch.zeros_like(start, dtype=torch.float64)
    state = _Ivon(
        shard.net,
        start,
        steps=0,
        lr=HOW.lr,
        beta1=HOW.beta1,
        beta2=HOW.beta2,
        ess=ESS,
        prior_mean=prior,
        prior_precision=prior + DELTA,
        dual=None,
        h=0.0,
        moments=None,
    )
    state.stored.copy_(h)
    torch.add(state.stored, state.offset, out=state.total)
    order, draws, eps = RNG.torch("batches"), RNG.torch("ivon"), torch.empty_like(start)
    shard.net.module.train()
    for _ in range(HOW.epochs):
        for inputs, targets in shard.batches(HOW.batch_size, order):
            state.sample(eps.normal_(generator=draws), out=shard.net.weights)
            shard.net.loss_gradient(inputs, targets, 1.0)
            state.accumulate(shard.net.grads)
            state.step()
    fit = ivon_opt(shard, start, curvature=h, how=HOW, rng=RNG, round=1, delta=DELTA, ess=ESS)
    assert torch.equal(fit.solution.mean, state.mean)
    assert torch.equal(fit.solution.curvature, state.stored)


def test_it_changes_neither_its_arguments_nor_torchs_generator(shard: Shard) -> None:
    """Also with dropout, whose draws come from the same stream."""
    net = Net(nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.5), nn.Linear(13, 5)))
    shard = Shard(net, shard.inputs, shard.targets, 1.0)
    start = net.snapshot()
    h, results = torch.full_like(start, 0.1), []
    before = start.clone(), h.clone()
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        fit = ivon_opt(shard, start, curvature=h, how=HOW, rng=RNG, round=1, delta=DELTA, ess=ESS)
        assert torch.equal(torch.get_rng_state(), state)
        results.append(fit.solution)
    assert torch.equal(results[0].mean, results[1].mean)
    assert torch.equal(results[0].curvature, results[1].curvature)
    assert torch.equal(start, before[0]) and torch.equal(h, before[1])


def test_a_quadratic_loss_has_the_minimiser_in_closed_form() -> None:
    g = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=g, dtype=torch.float64)
    shard = QuadraticShard(root @ root.T, torch.randn(6, generator=g, dtype=torch.float64), 5)
    start = torch.zeros(6, dtype=torch.float64)
    how = IvonTraining(optimiser="exact")
    fit = ivon_opt(shard, start, curvature=start, how=how, rng=RNG, round=1, delta=DELTA, ess=ESS)
    d = DELTA / ESS * torch.eye(6, dtype=torch.float64)
    exact = torch.linalg.solve(shard.hessian / 5 + d, shard.linear / 5)
    assert torch.allclose(fit.solution.mean, exact, rtol=1e-12)
    assert torch.allclose(fit.solution.curvature, shard.hessian.diagonal() / 5, rtol=1e-15)
    with pytest.raises(UsageError, match="optimiser=exact"):
        ivon_opt(shard, start, curvature=start, how=IvonTraining(), rng=RNG, round=1, delta=DELTA, ess=ESS)


def test_the_package_is_imported_at_the_first_training() -> None:
    code = "import sys, protocols, fedsim.learning.solvers.ivon_opt; print('ivon' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
