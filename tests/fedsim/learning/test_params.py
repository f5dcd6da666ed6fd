"""Flat buffers: leaves and gradients are views of two vectors, and stay so after training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.params import Layout, Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.seeds import RandomStream
from tests.support.tolerances import loss_gradient, moved


class Nested(nn.Module):
    """Submodules of submodules and a parameter of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU())
        self.gain = nn.Parameter(torch.ones(4))
        self.out = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.gain * self.body(x))
        return out


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net(Nested())


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(9, 2, 3, generator=draws), torch.randint(3, (9,), generator=draws)


def assert_views(net: Net) -> None:
    """Every leaf and its gradient lie in the flat buffers where the layout says."""
    parameters = dict(net.module.named_parameters())
    assert list(parameters) == [s.name for s in net.layout.slices]
    for s in net.layout.slices:
        leaf = parameters[s.name]
        assert leaf.is_leaf
        assert leaf.shape == s.shape
        assert leaf.data_ptr() == net.weights[s.offset :].data_ptr()
        assert leaf.grad is not None
        assert leaf.grad.shape == s.shape
        assert leaf.grad.data_ptr() == net.grads[s.offset :].data_ptr()


def test_layout_is_parameters_in_order_each_row_major() -> None:
    module = Nested()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    net = Net(module)
    assert [(s.name, s.shape, s.offset) for s in net.layout.slices] == [
        *(("gain", (4,), 0), ("body.1.weight", (4, 6), 4), ("body.1.bias", (4,), 28)),
        ("out.weight", (3, 4), 32),
    ]
    assert net.layout.size == 44 == len(net.weights)
    views = net.layout.unflatten(net.weights)
    assert all(torch.equal(views[name], value) for name, value in before.items())
    views["gain"][1] = 7.0
    assert net.weights[1] == 7.0


def test_layout_of_a_problem_without_a_network() -> None:
    layout = Layout.vector(5)
    assert layout.size == 5
    assert torch.equal(layout.unflatten(torch.arange(5.0))["w"], torch.arange(5.0))


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_leaves_and_grads_stay_views_after_training(
    net: Net, batch: tuple[Tensor, Tensor], optimiser: str
) -> None:
    assert_views(net)
    how = LocalTraining(epochs=3, batch_size=4, lr=0.05, optimiser=optimiser, momentum=0.5, clip=1.0)
    fit = minimise(Shard(net, *batch, 1.0), net.snapshot(), how=how, rng=RandomStream(0, "views"), round=1)
    assert_views(net)
    assert torch.equal(fit.weights, net.weights)
    net.load(torch.arange(44.0))
    assert_views(net)
    out = dict(net.module.named_parameters())["out.weight"]
    assert torch.equal(out.detach().reshape(-1), torch.arange(32.0, 44.0))


def test_gradients_land_in_the_flat_buffer(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    inputs, targets = batch
    net.grads.fill_(5.0)  # what an earlier task left there must not count
    loss = net.loss_gradient(inputs, targets, 1.0)
    plain = F.cross_entropy(net.module(inputs), targets)
    expected = torch.autograd.grad(plain, list(net.module.parameters()))
    assert torch.equal(loss, plain.detach())
    assert not loss.requires_grad
    assert torch.equal(net.grads, torch.cat([g.reshape(-1) for g in expected]))


def test_weight_scales_the_gradient_and_not_the_reported_loss(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    loss = net.loss_gradient(*batch, 1.0)
    mean = net.grads.clone()
    assert torch.equal(net.loss_gradient(*batch, 9.0), loss)
    # the factor enters before the backward pass: the same sums of other terms
    inputs, targets = batch
    terms = len(inputs) + sum(p.shape[-1] for p in net.module.parameters())
    error = moved(loss_gradient(net, targets, 9.0), net.weights, inputs, roundings=2 * terms + 40)
    assert float((net.grads - 9.0 * mean).norm()) < 2 * error < 1e-3 * float(net.grads.norm())


def test_logits_are_of_evaluation_mode_and_need_no_gradients() -> None:
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)))
    net.module.train()
    weights, inputs = net.snapshot() + 1, torch.randn(3, 4)
    first = net.logits(weights, inputs)
    expected = inputs @ weights[:8].view(2, 4).T + weights[8:]
    assert not first.requires_grad
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.parametrize(
    ("module", "stochastic"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()), False),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), False),  # from a generator of the network's
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout2d(0.1)), True),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout(0.1)), True),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.RReLU()), True),
        (Nested, True),  # a user's own forward may call F.dropout
    ],
)
def test_knows_which_modules_may_draw(module: Callable[[], nn.Module], stochastic: bool) -> None:
    assert Net(module()).stochastic is stochastic


def tied() -> nn.Module:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    module[2].weight = module[0].weight
    return module


def test_a_shared_parameter_stands_once_and_its_gradient_is_of_both_uses() -> None:
    net, inputs, targets = Net(tied()), torch.randn(5, 3), torch.arange(5) % 3
    assert [s.name for s in net.layout.slices] == ["0.weight"]
    net.load(torch.arange(9.0) / 9)
    assert net.module[2].weight is net.module[0].weight
    net.loss_gradient(inputs, targets, 1.0)
    one, other = (net.snapshot().view(3, 3).requires_grad_() for _ in range(2))
    loss = F.cross_entropy(F.linear(F.linear(inputs, one).tanh(), other), targets)
    both = sum(torch.autograd.grad(loss, (one, other)))
    assert (net.grads.view(3, 3) - both).norm() <= 2**-20 * both.norm()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: nn.Linear(2, 2).double(), "float32"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "floating-point buffers"),
    ],
    ids=["float64", "batchnorm"],
)
def test_refuses_modules_whose_state_is_not_the_vector(module: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Net(module())
