"""Local solvers against torch's own optimisers on an ordinary module, bit for bit where stated.

The fused Adam kernel rounds differently in its scalar tail, the elements beyond the last whole vector
register. Bits therefore agree with the ordinary module where every parameter's size is a multiple of
16, as here; for other sizes the reference is torch.optim.Adam on one flat parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.gaussian import Distance, Gaussian, Penalty
from fedsim.learning.params import Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.seeds import RandomStream, seeded_torch
from tests.support.tolerances import gamma, loss_gradient, moved

N = 26
STEPS = LocalTraining(epochs=6, batch_size=6, lr=0.02)
"""Five batches an epoch, the last of two examples: 30 steps."""
ROUNDING = {"rtol": gamma(30 * 40), "atol": gamma(30 * 40)}
"""30 steps of a learning rate below 1, each with sums of 6, 16 and 6 terms and some twelve operations, on
weights and gradients of size 1."""


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))


@pytest.fixture
def shard(module: nn.Module) -> Shard:
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randint(17, (N, 2, 3), generator=draws).to(torch.uint8)
    return Shard(Net(copy.deepcopy(module)), inputs, torch.randint(16, (N,), generator=draws), 16.0)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def batches(shard: Shard, how: LocalTraining, rng: RandomStream) -> Iterator[tuple[Tensor, Tensor]]:
    """All batches of a task, written out without the shard's help."""
    order = rng.torch("batches")
    for _ in range(how.epochs):
        rows = torch.randperm(N, generator=order)
        for selected in rows.split(how.batch_size):
            yield shard.inputs[selected].to(torch.float32) / 16.0, shard.targets[selected]


def train(
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    objective: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> int:
    """The loop of a tutorial; returns the number of steps."""
    steps = 0
    for inputs, targets in data:
        optimiser.zero_grad()
        objective(F.cross_entropy(module(inputs), targets)).backward()
        optimiser.step()
        steps += 1
    return steps


def fused_adam(module: nn.Module, how: LocalTraining) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=how.lr, fused=True)


# ---- bit for bit


def test_thirty_adam_steps_are_torchs_bit_for_bit(module: nn.Module, shard: Shard) -> None:
    rng = RandomStream(3, "client", 1, 2)
    fit = minimise(shard, flat(module), how=STEPS, rng=rng, round=rng.round)
    optimiser = fused_adam(module, STEPS)
    assert train(module, optimiser, batches(shard, STEPS, rng)) == 30
    assert torch.equal(fit.weights, flat(module))
    assert fit.carried is not None
    assert fit.carried.steps == 30
    state = [optimiser.state[p] for p in module.parameters()]
    assert torch.equal(fit.carried.first, torch.cat([s["exp_avg"].reshape(-1) for s in state]))
    assert torch.equal(fit.carried.second, torch.cat([s["exp_avg_sq"].reshape(-1) for s in state]))


def test_adam_on_ragged_parameters_is_torchs_on_the_flat_vector(shard: Shard) -> None:
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 16)))
    ragged, rng, start = replace(shard, net=net), RandomStream(3, "client", 1, 2), net.snapshot()
    fit = minimise(ragged, start, how=STEPS, rng=rng, round=rng.round)
    whole = nn.Parameter(start.clone())
    optimiser = torch.optim.Adam([whole], lr=STEPS.lr, fused=True)
    for inputs, targets in batches(shard, STEPS, rng):
        net.load(whole.detach())
        net.loss_gradient(inputs, targets, 1.0)
        whole.grad = net.grads.clone()
        optimiser.step()
    assert torch.equal(fit.weights, whole.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_thirty_sgd_steps_are_torchs_bit_for_bit(module: nn.Module, shard: Shard, momentum: float) -> None:
    how, rng = replace(STEPS, optimiser="sgd", momentum=momentum), RandomStream(3, "client", 1, 2)
    fit = minimise(shard, flat(module), how=how, rng=rng, round=rng.round)
    train(module, torch.optim.SGD(module.parameters(), how.lr, momentum), batches(shard, how, rng))
    assert torch.equal(fit.weights, flat(module))
    assert fit.carried is None


def test_carried_moments_make_two_tasks_one_long_run(module: nn.Module, shard: Shard) -> None:
    one, two = RandomStream(3, "client", 1, 2), RandomStream(3, "client", 2, 2)
    first = minimise(shard, flat(module), how=STEPS, rng=one, round=one.round)
    second = minimise(shard, first.weights, how=STEPS, rng=two, round=two.round, moments=first.carried)
    optimiser = fused_adam(module, STEPS)
    train(module, optimiser, batches(shard, STEPS, one))
    train(module, optimiser, batches(shard, STEPS, two))
    assert torch.equal(second.weights, flat(module))
    assert second.carried is not None
    assert second.carried.steps == 60


# ---- the objective


def penalties_at(weights: Tensor) -> tuple[Penalty, ...]:
    draws = torch.Generator().manual_seed(5)
    away = torch.randn(len(weights), generator=draws, dtype=torch.float64)
    diagonal = Gaussian.at(weights + 0.1 * away, away.abs())
    return diagonal, Gaussian(away, 0.0) ** -1, Distance(weights + 0.1, 0.4)


def objective_of(
    module: nn.Module, weight: float, penalties: tuple[Penalty, ...]
) -> Callable[[Tensor], Tensor]:
    """weight * loss + penalties, written out for autograd."""

    def objective(loss: Tensor) -> Tensor:
        w = torch.cat([p.reshape(-1) for p in module.parameters()])
        total = weight * loss
        for p in penalties:
            if isinstance(p, Distance):
                total = total + p.strength / 2 * (w - p.centre).norm()
            else:
                shift, precision = p.shift.float(), torch.as_tensor(p.precision).float()
                total = total + 0.5 * (precision * w * w).sum() - shift @ w
        return total

    return objective


@pytest.mark.parametrize("weight", [1.0, float(N)])
def test_adam_sees_the_objective_as_it_is(module: nn.Module, shard: Shard, weight: float) -> None:
    start, rng = flat(module), RandomStream(3, "client", 1, 2)
    how = replace(STEPS, epochs=2)
    cavities = penalties_at(start)
    fit = minimise(shard, start, how=how, rng=rng, round=rng.round, weight=weight, penalties=cavities)
    train(module, fused_adam(module, how), batches(shard, how, rng), objective_of(module, weight, cavities))
    torch.testing.assert_close(fit.weights, flat(module), rtol=1e-4, atol=1e-5)  # ten steps of rounding


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_sees_the_objective_divided_by_its_weight(
    module: nn.Module, shard: Shard, momentum: float
) -> None:
    start, rng = flat(module), RandomStream(3, "client", 1, 2)
    how = replace(STEPS, epochs=2, optimiser="sgd", momentum=momentum)
    cavities = penalties_at(start)
    fit = minimise(shard, start, how=how, rng=rng, round=rng.round, weight=N, penalties=cavities)
    whole = objective_of(module, N, cavities)
    optimiser = torch.optim.SGD(module.parameters(), how.lr, momentum)
    train(module, optimiser, batches(shard, how, rng), lambda loss: whole(loss) / N)
    torch.testing.assert_close(fit.weights, flat(module), **ROUNDING)


def test_clip_is_torchs_over_many_steps(module: nn.Module, shard: Shard) -> None:
    start, rng = flat(module), RandomStream(3, "client", 1, 2)
    how = replace(STEPS, optimiser="sgd", lr=0.3, clip=0.75)
    fit = minimise(shard, start, how=how, rng=rng, round=rng.round)
    clipped = 0
    for inputs, targets in batches(shard, how, rng):
        module.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        clipped += int(nn.utils.clip_grad_norm_(module.parameters(), how.clip) > how.clip)
        with torch.no_grad():
            for p in module.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=how.lr)
    assert 0 < clipped < 30
    torch.testing.assert_close(fit.weights, flat(module), **ROUNDING)


def mean_loss(module: nn.Module, shard: Shard) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(module(shard.inputs / 16.0), shard.targets))


def test_reported_loss_is_the_mean_over_examples_of_the_last_epoch(module: nn.Module, shard: Shard) -> None:
    start, rng = flat(module), RandomStream(3, "client", 1, 2)
    still = LocalTraining(epochs=2, batch_size=6, lr=1e-30, optimiser="sgd")
    cavity = Gaussian.at(start + 1, 5.0)
    everything = mean_loss(module, shard)
    fit = minimise(shard, start, how=still, rng=rng, round=rng.round, weight=N, penalties=(cavity,))
    of_loss = loss_gradient(shard.net, shard.targets)
    error = moved(lambda *x: of_loss(*x)[:1], start, shard.inputs / 16.0, roundings=6 + 16 + N + 40)
    assert fit.loss == pytest.approx(everything, abs=2 * error)  # the short batch counts by its size
    assert 2 * error < 1e-4 * everything
    how = LocalTraining(epochs=2, batch_size=N, lr=0.5, optimiser="sgd")
    fit = minimise(shard, start, how=how, rng=rng, round=rng.round)
    train(module, torch.optim.SGD(module.parameters(), 0.5), batches(shard, replace(how, epochs=1), rng))
    after_one_step = mean_loss(module, shard)
    assert after_one_step != pytest.approx(everything, rel=1e-3)
    assert fit.loss == pytest.approx(after_one_step, rel=1e-5)


# ---- pure functions


@pytest.fixture
def noisy(shard: Shard) -> Shard:
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16)))
    return replace(shard, net=net)


def test_dropout_draws_from_its_stream_alone(noisy: Shard) -> None:
    start, how = noisy.net.snapshot(), replace(STEPS, epochs=2)

    def fit(client: int) -> Tensor:
        return minimise(noisy, start, how=how, rng=RandomStream(3, "client", 1, client), round=1).weights

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = fit(2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first, fit(2))
    assert not torch.equal(first, fit(3))


def test_dropout_is_on_while_training_and_differs_from_step_to_step(noisy: Shard) -> None:
    start, rng = noisy.net.snapshot(), RandomStream(3, "client", 1, 2)
    how = LocalTraining(epochs=2, batch_size=N, lr=0.1, optimiser="sgd")
    noisy.net.module.eval()  # as an evaluation leaves it
    fit = minimise(noisy, start, how=how, rng=rng, round=rng.round)
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))
    nn.utils.vector_to_parameters(start, module.parameters())
    with seeded_torch(rng.key("dropout")):
        train(module, torch.optim.SGD(module.parameters(), 0.1), batches(noisy, how, rng))
    torch.testing.assert_close(fit.weights, flat(module), **ROUNDING)


# ---- closed form

D = 20
EXACT = LocalTraining(optimiser="exact")


def quadratic(size: int) -> QuadraticShard:
    draws = torch.Generator().manual_seed(7)
    x = torch.randn(40, D, generator=draws, dtype=torch.float64)
    return QuadraticShard(x.T @ x, torch.randn(D, generator=draws, dtype=torch.float64), size)


def test_exact_is_the_dense_solve() -> None:
    client = quadratic(size=40)
    prior = Gaussian.at(torch.ones(D), 0.3)
    site = Gaussian(torch.arange(D).double(), torch.linspace(0.0, 1.0, D).double())
    penalties: tuple[Penalty, ...] = (prior, site**-1)
    start = torch.zeros(D, dtype=torch.float64)
    for weight in (1.0, 40.0):
        fit = minimise(
            client,
            start,
            how=EXACT,
            rng=RandomStream(0, "c"),
            round=1,
            weight=weight,
            penalties=penalties,
            moments=None,
        )
        diagonal = 0.3 - torch.linspace(0.0, 1.0, D).double()
        matrix = weight / 40 * client.hessian + torch.diag(diagonal)
        right = weight / 40 * client.linear + 0.3 - site.shift
        exact = torch.linalg.inv(matrix) @ right
        assert float((fit.weights - exact).norm() / exact.norm()) < 1e-13
        mean_loss = exact @ (client.hessian / 2 @ exact - client.linear) / 40
        assert fit.loss == pytest.approx(float(mean_loss), rel=1e-12)
        assert fit.carried is None


def test_exact_and_quadratic_need_each_other(shard: Shard) -> None:
    with pytest.raises(UsageError, match="quadratic"):
        minimise(shard, shard.net.snapshot(), how=EXACT, rng=RandomStream(0, "c"), round=1)
    with pytest.raises(UsageError, match="exact"):
        minimise(quadratic(1), torch.zeros(D), how=LocalTraining(), rng=RandomStream(0, "c"), round=1)


def test_sgd_clips_the_same_on_both_scales(shard: Shard) -> None:
    """The released code divides the summed loss by N_k and then clips (docs/references/misprints.md)."""
    how = LocalTraining(epochs=1, batch_size=4, lr=0.1, optimiser="sgd", clip=1e-3)
    start = torch.randn(shard.net.layout.size, generator=torch.Generator().manual_seed(3))
    ends = [
        minimise(shard, start, how=how, rng=RandomStream(0, "clip"), round=1, weight=weight).weights
        for weight in (1.0, 64.0)
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-7)
    steps = -(-shard.size // 4)
    assert float((ends[0] - start).norm()) <= steps * 0.1 * 1e-3 * 1.001
    assert float((ends[0] - start).norm()) > 0
