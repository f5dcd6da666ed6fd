"""Server rules against Reddi et al. 2021, Algorithm 2, and torch's own SGD."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsim.learning.solvers.server import ServerOptimiser, moments, step

DELTAS = [torch.tensor(d, dtype=torch.float64) for d in ([1.0, -2.0, 0.0], [0.5, 3.0, 0.1], [-1.0, 0.2, 0.0])]
START = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def played(how: ServerOptimiser) -> Tensor:
    weights, state = START, moments(how, START)
    for delta in DELTAS:
        weights, state = step(how, state, weights, delta)
    assert state.folds == len(DELTAS)
    return weights


def test_sgd_is_torchs_with_momentum() -> None:
    w = torch.nn.Parameter(START.clone())
    torch_sgd = torch.optim.SGD([w], lr=0.3, momentum=0.9)
    for delta in DELTAS:
        w.grad = delta.clone()
        torch_sgd.step()
    assert torch.allclose(played(ServerOptimiser("sgd", 0.3, 0.9)), w.detach(), rtol=1e-14)


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_adaptive_rules_are_the_papers(rule: str) -> None:
    beta, beta2, tau, lr, decay = 0.8, 0.95, 0.01, 0.1, 0.5
    w, m, v = START.clone(), torch.zeros(3, dtype=torch.float64), torch.full((3,), tau**2).double()
    for t, delta in enumerate(DELTAS):
        m = beta * m + (1 - beta) * delta
        for i, d in enumerate(delta.tolist()):
            if rule == "adagrad":
                v[i] += d * d
            elif rule == "adam":
                v[i] = beta2 * v[i] + (1 - beta2) * d * d
            else:
                sign = (float(v[i]) > d * d) - (float(v[i]) < d * d)
                v[i] -= (1 - beta2) * d * d * sign
        w = w - lr * decay**t * m / (v.sqrt() + tau)
    result = played(ServerOptimiser(rule, lr, beta, beta2, tau, decay))  # type: ignore[arg-type]
    assert torch.allclose(result, w, rtol=1e-13)
