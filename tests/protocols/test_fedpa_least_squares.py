"""FedPA finds the pooled solution, FedAvg does not (Al-Shedivat et al. 2021, Fig. 1)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fedsim.learning.shards import QuadraticShard
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.learning.solvers.iasg import Chain, Sampling
from fedsim.learning.solvers.server import ServerOptimiser
from fedsim.seeds import RandomStream
from protocols.fedopt import FedAvgM
from protocols.fedpa import FedPA

PLAIN = ServerOptimiser("sgd", server_lr=1.0)


def test_with_exact_samples_fedpa_converges_to_the_pooled_solution(
    quadratics: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples whose mean and covariance are the posterior's leave only the
    shrinkage's, 1 / (1 + 39 rho) = 2.6e-7 of the identity, against variances of about 1e-2."""
    shards = quadratics.regressions(5, 8)

    def exact(
        shard: QuadraticShard, start: Tensor, *, how: Sampling, rng: RandomStream, round: int
    ) -> LocalFit[Chain, None]:
        raw = torch.randn(40, 8, generator=rng.torch("exact"), dtype=torch.float64)
        raw = raw - raw.mean(0)
        white = raw @ torch.linalg.inv(torch.linalg.cholesky(raw.T @ raw / 39)).T
        mean, root = torch.linalg.solve(shard.hessian, shard.linear), torch.linalg.inv(shard.hessian)
        return LocalFit(Chain(mean + white @ torch.linalg.cholesky(root).T, mean), 0.0)

    monkeypatch.setattr("protocols.fedpa.iasg", exact)
    curvature = torch.linalg.eigvalsh(torch.stack([s.hessian for s in shards]).mean(0))
    server = replace(PLAIN, server_lr=float(2 / (curvature[0] + curvature[-1])))
    fedpa = quadratics.Federation(FedPA(1e5, 0, server), shards)
    fedavg = quadratics.Federation(FedAvgM(PLAIN, LocalTraining(optimiser="exact")), shards)
    for _ in range(int(20 * curvature[-1] / curvature[0])):
        fedpa.play()
    fedavg.play()
    pooled = quadratics.minimiser(shards, 0.0)
    assert quadratics.error(fedpa.mean, pooled) < 1e-4  # measured 5e-6 .. 1.4e-5
    assert quadratics.error(fedavg.mean, pooled) > 0.5  # measured 0.9 .. 1.8
