"""FedGVI: PVI where nothing is generalised, its divergence and losses against their definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.params import Net
from fedsim.learning.robust_losses import RobustLoss
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.ivon import IvonTraining, ivon
from fedsim.seeds import RandomStream, seeded_torch
from protocols.related.fedgvi import FedGVI

EXACT = IvonTraining(optimiser="exact")
P = 6


def test_with_the_likelihood_and_the_kl_it_is_ivon_pvi_bit_for_bit(launched: Callable[..., Path]) -> None:
    """The relative error is 0."""
    digests = []
    for algo, own in (("ivon_pvi", {}), ("fedgvi", {"loss": "nll", "alpha": 1.0})):
        run = launched(
            algo,
            algo=algo,
            clients=3,
            rounds=2,
            fraction=0.2,
            participation="0.7",
            hyperparameters={"epochs": 1, **own},
        )
        summary = json.loads((run / "summary.json").read_text())
        digests.append((summary["model_sha256"], summary["clients_sha256"]))
    assert digests[0] == digests[1]


def renyi(m: Tensor, s: Tensor, m_c: Tensor, s_c: Tensor, alpha: float) -> Tensor:
    """D_alpha by its definition, from log partition functions of diagonal Gaussians."""

    def log_partition(shift: Tensor, precision: Tensor) -> Tensor:
        return (shift**2 / precision - precision.log()).sum() / 2

    q, p = (s * m, s), (s_c * m_c, s_c)
    both = tuple(alpha * a + (1 - alpha) * b for a, b in zip(q, p, strict=True))
    integral = log_partition(*both) - alpha * log_partition(*q) - (1 - alpha) * log_partition(*p)
    return integral / (alpha * (alpha - 1))


@pytest.mark.parametrize("alpha", [0.5, 1.5, 2.5, 10.0])
def test_a_client_minimises_its_loss_and_the_divergence(quadratics: SimpleNamespace, alpha: float) -> None:
    """The gradient of E_q[l_k / tau] + D_alpha(q || q_g / t_k) in m and log s vanishes at q_k."""
    (shard,) = quadratics.regressions(1, P, rows=9)
    tau, algorithm = 0.5, FedGVI("nll", alpha=alpha, tau=0.5, damping=0.5, delta=3.0, local=EXACT)
    federation = quadratics.Federation(algorithm, (shard,))
    federation.play()
    q_g, site = federation.server.q, federation.clients[0].dual.site
    federation.play()
    cavity, up = q_g / site, federation.uploads[0]
    mean = up.mean.clone().requires_grad_()
    log_s = up.precision.log().requires_grad_()
    expected = mean @ shard.hessian @ mean / 2 - shard.linear @ mean
    expected = expected + (shard.hessian.diagonal() / log_s.exp()).sum() / 2
    divergence = renyi(mean, log_s.exp(), cavity.mean, torch.as_tensor(cavity.precision), alpha)
    for leaf, scale in ((mean, shard.linear.norm() / tau), (log_s, 1.0)):
        (slope,) = torch.autograd.grad(expected / tau + divergence, leaf, retain_graph=True)
        assert float(slope.norm() / scale) < 1e-9


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_losses_are_their_formulas(power: float) -> None:
    with seeded_torch(0):
        outputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 4
    p = outputs.softmax(1)
    p_y = p[torch.arange(7), targets]
    gce = ((1 - p_y**power) / power).mean()
    rest = (((p ** (1 + power)).sum(1) - 1) / (1 + power)).mean()
    assert float(RobustLoss("gce", power)(outputs, targets)) == pytest.approx(float(gce), rel=1e-12)
    both = RobustLoss("density_power", power)(outputs, targets)
    assert float(both) == pytest.approx(float(gce + rest), rel=1e-12)


def test_a_robust_loss_is_for_classes() -> None:
    net = Net(nn.Linear(3, 2), likelihood=likelihood("gaussian"))
    shard = Shard(net, torch.randn(5, 3), torch.randn(5, 2), 1.0)
    one = torch.ones(8).double()
    with pytest.raises(UsageError, match="a robust loss is for targets that are classes"):
        ivon(
            shard, net.snapshot(), how=IvonTraining(), rng=RandomStream(0, "client"), round=1,
            prior_mean=0 * one, prior_precision=one, ess=5.0, loss=RobustLoss("gce", 0.5),
        )  # fmt: skip
