"""What a client sees of its data: batches, scaling, curvature; and clients known in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.curvature.diagonal_ggn import diagonal_ggn
from fedsim.learning.gaussian import Distance, Gaussian
from fedsim.learning.params import Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.seeds import RandomStream
from tests.support.tolerances import loss_gradient, moved

N = 23


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def shard() -> Shard:
    """23 byte images of one pixel row each; input n starts with the byte n."""
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    inputs = torch.randint(17, (N, 1, 4), generator=draws(1)).to(torch.uint8)
    inputs[:, 0, 0] = torch.arange(N)
    return Shard(net, inputs, torch.arange(N) % 3, scale=16.0)


def rows(batches: list[tuple[Tensor, Tensor]], scale: float) -> list[int]:
    """Which examples, in which order."""
    return [round(float(x) * scale) for inputs, _ in batches for x in inputs[:, 0, 0]]


def test_an_epoch_is_every_example_once_and_keeps_the_short_last_batch(shard: Shard) -> None:
    epoch = list(shard.batches(5, draws(2)))
    assert [len(t) for _, t in epoch] == [5, 5, 5, 5, 3]
    order = rows(epoch, shard.scale)
    assert sorted(order) == list(range(N))
    assert order != list(range(N))
    targets = torch.cat([t for _, t in epoch])
    assert targets.tolist() == [n % 3 for n in order]
    assert shard.size == N


def test_a_batch_larger_than_the_shard_is_the_shard(shard: Shard) -> None:
    assert [len(t) for _, t in shard.batches(64, draws(2))] == [N]


def test_epochs_reshuffle_and_repeat_with_the_generator(shard: Shard) -> None:
    order = draws(2)
    first, second = (rows(list(shard.batches(5, order)), shard.scale) for _ in range(2))
    assert first != second
    again = draws(2)
    assert [first, second] == [rows(list(shard.batches(5, again)), shard.scale) for _ in range(2)]


def test_scaled_and_raw_inputs(shard: Shard) -> None:
    raw = Shard(shard.net, shard.inputs, shard.targets, scale=1.0)
    (divided, _), (plain, _) = next(shard.batches(N, draws(2))), next(raw.batches(N, draws(2)))
    assert divided.dtype == plain.dtype == torch.float32
    assert plain.max() == N - 1
    assert torch.equal(divided, plain / 16.0)
    assert shard.inputs.dtype == torch.uint8


def test_curvature_is_the_ggn_of_the_summed_loss_on_scaled_inputs(shard: Shard) -> None:
    weights = torch.randn(shard.net.layout.size, generator=draws(3))
    result = shard.curvature(weights, "exact", RandomStream(0, "c"))
    shard.net.load(weights)
    one_by_one = torch.stack(
        [diagonal_ggn(shard.net.module, [shard.inputs[n : n + 1].to(torch.float32) / 16.0]) for n in range(N)]
    )
    assert result.dtype == torch.float32
    # 1e-5: float32, summed in another order
    torch.testing.assert_close(result, one_by_one.sum(0), rtol=1e-5, atol=1e-6)
    assert bool((result >= 0).all())


def test_sketched_curvature_draws_from_its_stream_alone(shard: Shard) -> None:
    weights = torch.randn(shard.net.layout.size, generator=draws(3))
    torch.manual_seed(1)
    first = shard.curvature(weights, "sign", RandomStream(0, "c", 1, 2))
    torch.manual_seed(2)
    assert torch.equal(first, shard.curvature(weights, "sign", RandomStream(0, "c", 1, 2)))
    assert not torch.equal(first, shard.curvature(weights, "sign", RandomStream(0, "c", 1, 3)))


# ---- quadratic clients

D = 8


@pytest.fixture
def quadratic() -> QuadraticShard:
    x = torch.randn(20, D, generator=draws(4), dtype=torch.float64)
    return QuadraticShard(x.T @ x, torch.randn(D, generator=draws(5), dtype=torch.float64), size=20)


def test_minimiser_is_stationary_on_both_loss_scales(quadratic: QuadraticShard) -> None:
    prior = Gaussian.at(torch.ones(D, dtype=torch.float64), torch.full((D,), 0.3, dtype=torch.float64))
    cavity = Gaussian(torch.arange(D, dtype=torch.float64), 0.0) ** -1
    for weight in (1.0, 20.0):
        w = quadratic.minimiser(weight, (prior, cavity)).requires_grad_()
        loss = 0.5 * w @ quadratic.hessian @ w - quadratic.linear @ w
        penalties = 0.15 * ((w - 1) ** 2).sum() + torch.arange(D, dtype=torch.float64) @ w
        (gradient,) = torch.autograd.grad(weight / 20 * loss + penalties, w)
        assert float(gradient.norm()) < 1e-11  # sums of terms of order 100 in float64


def test_quadratic_curvature_is_the_diagonal(quadratic: QuadraticShard) -> None:
    result = quadratic.curvature(torch.zeros(D), "exact", RandomStream(0, "c"))
    assert torch.equal(result, quadratic.hessian.diagonal())
    result.zero_()  # a copy
    assert float(quadratic.hessian.diagonal().min()) > 0


def test_no_closed_form_for_the_unsquared_norm(quadratic: QuadraticShard) -> None:
    with pytest.raises(UsageError, match="squared"):
        quadratic.minimiser(1.0, (Distance(torch.zeros(D), 1.0),))


def test_batch_of_a_shard_has_the_gradient_of_its_mean_loss(shard: Shard) -> None:
    weights = torch.randn(shard.net.layout.size, generator=draws(3))
    total, examples = torch.zeros_like(weights), 0
    with shard.noise(7):
        for batch in shard.epoch(5, draws(2)):
            gradient, loss = batch.loss_gradient(weights)
            total += gradient * batch.size
            examples += batch.size
            assert loss > 0
    assert examples == N
    inputs, exact = shard.floats(shard.inputs), loss_gradient(shard.net, shard.targets, float(N))
    # sums of 4 and 5 terms forwards, 3 and 5 backwards, over N examples; some forty operations
    error = moved(lambda *x: exact(*x)[1:], weights, inputs, roundings=17 + N + 40)
    assert float((total - shard.gradient(weights)).norm()) < 2 * error < 1e-3 * float(total.norm())


def test_quadratic_epoch_is_one_exact_gradient(quadratic: QuadraticShard) -> None:
    weights = torch.randn(D, generator=draws(6), dtype=torch.float64)
    with quadratic.noise(7):
        (batch,) = quadratic.epoch(5, draws(2))
    gradient, loss = batch.loss_gradient(weights)
    assert torch.equal(gradient, quadratic.gradient(weights) / 20)
    assert loss == quadratic.loss(weights) and batch.size == 20
