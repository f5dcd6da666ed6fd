"""Asynchronous rounds on clients with quadratic losses: the pooled solution, whatever the staleness."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsim.algorithm import Algorithm, Task
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.seeds import RandomStream
from protocols._averaging import Down, Server, Up
from protocols._local_solvers import VonTraining
from protocols.fedavg import FedAvg
from protocols.fedlap import FedLap
from protocols.fedlap_cov import FedLapCov
from protocols.pvi import PVI
from tests.support.tolerances import gamma

K, D, DELTA = 4, 6, 5.0
SIZES = (10, 20, 40, 80)
EXACT = LocalTraining(optimiser="exact")


def play(federation: Any, steps: int, seed: int, damping: float = 0.0) -> list[int]:
    """Steps of the server with one or two uploads each, of random ages: client k answers the broadcast that
    it got when it was folded last. Returns every staleness."""
    algorithm: Algorithm[Any, Any, Any, Any] = federation.algorithm
    draws, seen = random.Random(seed), []
    downs: dict[int, Any] = {}
    got = dict.fromkeys(range(K), 0)
    for r in range(steps):
        federation.round = r + 1
        ctx = replace(federation.context(asked=2), mixed=True)
        downs[r] = algorithm.broadcast(federation.server, ctx)
        arrivals = []
        for k in sorted(draws.sample(range(K), draws.choice((1, 2)))):
            staleness = r - got[k]
            seen.append(staleness)
            weight = (1 + staleness) ** -damping
            stream, down = RandomStream(0, "client.1", r + 1, k), downs[got[k]]
            task = Task(
                federation.start, federation.sizes, r + 1, 1, k, stream, federation.folds, 2, weight=weight
            )
            draft, up = algorithm.client_update(federation.clients[k], down, federation.shards[k], task)
            federation.clients[k] = algorithm.client_commit(draft, down, up, task)
            arrivals.append(ctx.arrival(k, down, up, weight))
            got[k] = r + 1
        federation.server = algorithm.server_update(federation.server, downs[r], iter(arrivals), ctx)
        federation.folds += 1
    return seen


@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize(
    ("algorithm", "steps", "tolerance"),
    [
        (PVI(covariance="full", delta=DELTA, damping=0.5, local=VonTraining(optimiser="exact")), 150, 1e-9),
        (FedLapCov(DELTA, 0.5, local=EXACT, covariance="full"), 150, 1e-9),
        (FedLap(100 * DELTA, 0.5, local=EXACT), 600, 1e-6),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_sites_converge_to_the_pooled_solution(
    quadratics: SimpleNamespace, algorithm: Any, steps: int, tolerance: float, damping: float
) -> None:
    shards = quadratics.regressions(K, D, sizes=SIZES)
    federation = quadratics.Federation(algorithm, shards)
    seen = play(federation, steps, seed=4, damping=damping)
    assert max(seen) >= 5  # steps that the server took meanwhile
    assert quadratics.error(federation.mean, quadratics.minimiser(shards, algorithm.delta)) < tolerance
    assert algorithm.dual_mismatch(federation.server, federation.clients) < 1e-12


def test_averages_move_by_what_a_client_has_moved(quadratics: SimpleNamespace) -> None:
    """FedBuff by hand: w + sum N_k s_k (w_k - w_a) / sum N_k, and a mean of fresh uploads is FedAvg's."""
    shards = quadratics.regressions(K, D, sizes=SIZES)
    federation = quadratics.Federation(FedAvg(EXACT), shards)
    ctx = replace(federation.context(), round=1, exchange=1, mixed=True)
    draws = torch.Generator().manual_seed(0)
    w, old, one, two = torch.randn(4, D, dtype=torch.float64, generator=draws)
    arrivals = [
        ctx.arrival(0, Down(old), Up(one, 0.0), 0.5),
        ctx.arrival(2, Down(w), Up(two, 0.0)),
    ]
    expected = w + (10 * 0.5 * (one - old) + 40 * (two - w)) / 50
    rounding = 2 * gamma(10, torch.float64)  # either side: differences, weights, their sum, a division
    server, algorithm = Server(w), federation.algorithm
    assert quadratics.error(algorithm.server_update(server, Down(w), arrivals, ctx).mean, expected) < rounding
    fresh = [ctx.arrival(k, Down(w), Up(x, 0.0)) for k, x in ((0, one), (2, two))]
    after = algorithm.server_update(server, Down(w), fresh, replace(ctx, mixed=False))
    assert quadratics.error(after.mean, (10 * one + 40 * two) / 50) < rounding
