"""Identities of FedOpt, FedPA, MB-SGD, Mime, FOLA, FedCurv on quadratic clients (float64)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.algorithm import Context, Task
from fedsim.learning.gaussian import Point
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalSGD, LocalTraining
from fedsim.learning.solvers.server import ServerOptimiser
from fedsim.seeds import RandomStream
from fedsim.wire.state_file import encode_state
from protocols._gaussian_product import Down
from protocols.fedavg import FedAvg
from protocols.fedcurv import FedCurv
from protocols.fedopt import FedAvgM
from protocols.fola import FOLA
from protocols.laplace_offline import LaplaceOffline
from protocols.mbsgd import MBSGD
from protocols.mime import Mime, MimeLite

EXACT = LocalTraining(optimiser="exact")
SIZES = (10, 20, 40, 80, 160)
PLAIN = ServerOptimiser("sgd", server_lr=1.0)


@pytest.fixture
def shards(quadratics: SimpleNamespace) -> Any:
    return quadratics.regressions(5, 20, sizes=SIZES, spread=0.2)


def weighted(values: list[Tensor]) -> Tensor:
    return sum(n * v for n, v in zip(SIZES, values, strict=True)) / sum(SIZES)  # type: ignore[return-value]


def test_fedavgm_with_step_one_and_no_momentum_is_fedavg(quadratics: SimpleNamespace, shards: Any) -> None:
    one = quadratics.Federation(FedAvg(EXACT), shards)
    two = quadratics.Federation(FedAvgM(PLAIN, EXACT), shards)
    for participants in ([0, 1, 4], [2], range(5)):
        one.play(participants)
        two.play(participants)
        assert quadratics.error(two.mean, one.mean) < 1e-13


def test_mbsgd_is_gradient_descent_on_the_mean_loss(quadratics: SimpleNamespace, shards: Any) -> None:
    federation = quadratics.Federation(MBSGD(server=ServerOptimiser("sgd", 0.01)), shards)
    w = federation.start
    for _ in range(3):
        federation.play()
        w = w - 0.01 * weighted([s.gradient(w) / s.size for s in shards])
    assert quadratics.error(federation.mean, w) < 1e-13


def test_mime_with_one_step_is_momentum_on_the_full_gradient(
    quadratics: SimpleNamespace, shards: Any
) -> None:
    """With one local step y = x, so the corrected gradient is c for everyone."""
    federation = quadratics.Federation(Mime(0.9, LocalSGD(epochs=1, lr=0.05)), shards)
    x, m = federation.start, torch.zeros_like(federation.start)
    for _ in range(4):
        federation.play()
        c = weighted([s.gradient(x) / s.size for s in shards])
        step = 0.1 * c + 0.9 * m
        x, m = x - 0.05 * step, step
        assert quadratics.error(federation.mean, x) < 1e-12
        assert quadratics.error(federation.server.momentum, m) < 1e-12


@pytest.mark.parametrize("algorithm", [MBSGD(), MimeLite()], ids=["mbsgd", "mimelite"])
def test_dropout_draws_from_the_tasks_own_stream(algorithm: Any) -> None:
    """The same task gives the same bits whatever torch's generator did, and leaves that as it was."""
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    shard = Shard(net, torch.randn(9, 5), torch.arange(9) % 3, 1.0)
    start = net.snapshot()
    task = Task(start, (9,), 1, 1, 0, RandomStream(0, "client.1", 1, 0))
    ctx = Context(start, net.layout, (9,), 1, 1, RandomStream(0, "server", 1))
    down = algorithm.broadcast(algorithm.server_init(ctx), ctx)
    result = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        _, up = algorithm.client_update(algorithm.client_init(ctx, 0), down, shard, task)
        assert torch.equal(torch.get_rng_state(), before)
        result.append(encode_state(up))
    assert result[0] == result[1]


def test_folas_precision_is_the_mean_of_what_was_found(quadratics: SimpleNamespace, shards: Any) -> None:
    """Eq. 17 unrolls to the plain mean over folded rounds; its first round has no weight on P = 0."""
    federation = quadratics.Federation(FOLA(1e-3, 0.0, local=EXACT), shards)
    fisher = weighted([s.hessian.diagonal() / s.size for s in shards])
    for _ in range(3):
        federation.play()
        assert quadratics.error(federation.server.curvature, fisher) < 1e-13
    local = [torch.linalg.solve(s.hessian, s.linear) for s in shards]
    precisions = [s.hessian.diagonal() / s.size + 1e-3 for s in shards]
    expected = weighted([p * w for p, w in zip(precisions, local, strict=True)]) / weighted(precisions)
    first = quadratics.Federation(FOLA(1e-3, 0.0, local=EXACT), shards)
    first.play()
    assert quadratics.error(first.mean, expected) < 1e-8  # lam = 0: the clients' own optima
    offline = quadratics.Federation(LaplaceOffline(1e-3, 0.0, local=EXACT), shards)
    offline.play()
    assert quadratics.error(offline.mean, first.mean) < 1e-13


def test_offline_curvature_is_that_of_the_round_alone() -> None:
    """P_k = F_k (Eq. 14); with running_mean it is Eq. 17's mean over rounds."""
    fisher, before = torch.full((3,), 6.0), Down(torch.zeros(3), torch.full((3,), 3.0))
    assert torch.equal(LaplaceOffline().precision(fisher, before, 3), fisher)
    for algorithm in (LaplaceOffline(running_mean=True), FOLA()):
        assert torch.equal(algorithm.precision(fisher, before, 3), torch.full((3,), 4.0))  # 6/3 + 2/3 of 3


@pytest.mark.parametrize("kind", [FOLA, LaplaceOffline])
def test_a_posterior_is_that_of_the_sum_of_log_likelihoods(
    quadratics: SimpleNamespace, shards: Any, kind: Any
) -> None:
    """P_S is the mean over examples; N P_S is the sum of all clients' curvatures."""
    federation = quadratics.Federation(kind(gamma=0.5, posterior=True, local=EXACT), shards)
    federation.play()
    q = federation.algorithm.model(federation.server, federation.context())
    total = torch.stack([s.hessian.diagonal() for s in shards]).sum(0)
    assert quadratics.error(q.precision, total + 0.5 * sum(SIZES)) < 1e-13
    assert quadratics.error(q.mean, federation.server.mean) < 1e-13
    point = kind(gamma=0.5, local=EXACT).model(federation.server, federation.context())
    assert isinstance(point, Point) and torch.equal(point.mean, federation.server.mean)


def test_fedcurv_penalises_towards_the_others_and_keeps_the_sums(
    quadratics: SimpleNamespace, shards: Any
) -> None:
    lam = 0.7
    federation = quadratics.Federation(FedCurv(lam, EXACT), shards)
    federation.play()
    first = [torch.linalg.solve(s.hessian, s.linear) for s in shards]
    fisher = [s.hessian.diagonal() / s.size for s in shards]
    federation.play([1, 3], lost=[3])
    s, others = shards[1], [0, 2, 3, 4]
    matrix = s.hessian / s.size + 2 * lam * torch.diag(sum(fisher[i] for i in others))
    vector = s.linear / s.size + 2 * lam * sum(fisher[i] * first[i] for i in others)
    assert quadratics.error(federation.mean, torch.linalg.solve(matrix, vector)) < 1e-11
    total = torch.stack([c.fisher.shift for c in federation.clients]).sum(0)
    assert quadratics.error(federation.server.fisher.shift, total) < 1e-13
