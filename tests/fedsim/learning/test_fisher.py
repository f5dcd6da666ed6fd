"""The empirical Fisher: by contraction and by vmap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedsim.learning.curvature import fisher
from fedsim.learning.curvature.fisher import squared_gradients
from fedsim.learning.likelihoods import LIKELIHOODS
from fedsim.learning.params import Net
from tests.support import tolerances


class Scaled(nn.Module):
    """A layer that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def one_by_one(net: Net, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    net.load(weights)
    net.module.eval()
    total = torch.zeros_like(weights)
    for x, y in zip(inputs, targets, strict=True):
        net.loss_gradient(x[None], y[None], 1.0)
        total += net.grads.square()
    return total


def rounding(net: Net, weights: Tensor, inputs: Tensor, targets: Tensor) -> float:
    """A bound of the error of one_by_one: sums of at most 64 terms forwards and backwards."""
    exact = tolerances.squared_gradients(net, targets)
    return tolerances.moved(exact, weights, inputs, roundings=2 * 64 + len(inputs) + 60)


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("extra", [(), (Scaled,)], ids=["rules", "vmap"])
def test_it_is_the_sum_over_examples_one_by_one(name: str, extra: tuple[type[nn.Module], ...]) -> None:
    """Dropout is off."""
    torch.manual_seed(1)
    layers = (nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))
    net = Net(nn.Sequential(*layers, *(created() for created in extra)), likelihood=LIKELIHOODS[name])
    inputs, weights = torch.randn(7, 5), net.snapshot() + 0.1
    targets = {
        "categorical": torch.randint(3, (7,)),
        "bernoulli": torch.randint(2, (7, 3)).to(torch.uint8),
        "gaussian": torch.randn(7, 3),
    }[name]
    exact = one_by_one(net, weights, inputs, targets)
    error = rounding(net, weights, inputs, targets)
    net.module.train()
    result = squared_gradients(net, weights, inputs, targets)
    assert float((result - exact).norm()) < 2 * error < 1e-3 * float(exact.norm())
    assert fisher.contracts(net.module) is (not extra)
