"""BA-BFL: each barycentre minimises the mean of its divergence, and clients start at the global posterior."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.learning.gaussian import kl_divergence
from fedsim.learning.solvers.ivon import IvonTraining
from protocols.related.ba_ivon import BaIvon

SIZES = (10, 20, 40, 80, 160)
EXACT = IvonTraining(optimiser="exact")
Divergence = Callable[[Tensor, Tensor, Tensor, Tensor], float]


def wasserstein(m: Tensor, s: Tensor, m_k: Tensor, s_k: Tensor) -> float:
    """The squared distance of diagonal Gaussians."""
    return float(((m - m_k) ** 2 + (s**-0.5 - s_k**-0.5) ** 2).sum())


DIVERGENCES: dict[str, Divergence] = {
    "reverse_kl": kl_divergence,
    "wasserstein": wasserstein,
    "forward_kl": lambda m, s, m_k, s_k: kl_divergence(m_k, s_k, m, s),
}


@pytest.fixture
def shards(quadratics: SimpleNamespace) -> Any:
    return quadratics.regressions(5, 20, sizes=SIZES)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_server_has_the_barycentre_of_the_participants(
    quadratics: SimpleNamespace, shards: Any, name: Any
) -> None:
    """The weighted mean of the divergences is stationary at q_g and grows in 20 random directions."""
    delta, tau, participants = 3.0, 0.5, (1, 2, 4)
    federation = quadratics.Federation(BaIvon(name, delta=delta, tau=tau, local=EXACT), shards)
    federation.play()
    federation.play(participants)
    q = federation.algorithm.model(federation.server, federation.context())
    locals_ = {k: (up.mean, up.precision) for k, up in federation.uploads.items()}
    for k, (m_k, s_k) in locals_.items():
        A, b = shards[k].hessian / tau, shards[k].linear / tau
        assert quadratics.error(m_k, torch.linalg.solve(A + delta * torch.eye(20).double(), b)) < 1e-12
        assert quadratics.error(s_k, A.diagonal() + delta) < 1e-13

    def mean_divergence(m: Tensor, s: Tensor) -> float:
        return sum(SIZES[k] * DIVERGENCES[name](m, s, *q_k) for k, q_k in locals_.items())

    least, draws = mean_divergence(q.mean, q.precision), torch.Generator().manual_seed(0)
    for _ in range(20):
        u, v = torch.randn(2, 20, generator=draws, dtype=torch.float64)
        ends = [mean_divergence(q.mean + h * u, q.precision * (h * v).exp()) for h in (-1e-3, 1e-3)]
        growth = sum(ends) / 2 - least
        assert growth > 0
        assert abs(ends[1] - ends[0]) < 0.01 * growth  # odd terms are of third order: 1e-9 beside 1e-6
