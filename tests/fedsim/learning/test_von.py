"""VON and the full GGN against brute force, closed forms and the stationarity of their own samples.

"Relative error" is |found - exact| / |exact|. Identities 3 and 13 of docs/references/equations.md#identities.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedsim.errors import TaskError, UsageError
from fedsim.learning.curvature.full_ggn import full_ggn
from fedsim.learning.gaussian import Gaussian, is_full
from fedsim.learning.params import Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers.von import VonTraining, von
from fedsim.seeds import RandomStream

pytestmark = pytest.mark.slow

RNG = RandomStream(0, "von-test", 3, 1)
EXACT = 1e-13
"""float64; measured 1e-16 .. 6e-16."""
ROUNDING = 3e-5
"""float32 passes; measured 1e-7 .. 2e-7."""


def error(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


# ---- the full GGN


def linear(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4, bias=bias))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def tiny(build: object) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    assert callable(build)
    return build().double().eval(), torch.randn(7, 2, 3, dtype=torch.float64)


@pytest.mark.parametrize("build", [linear, mlp])
def test_chunks_and_memory_do_not_matter(build: object) -> None:
    module, x = tiny(build)
    whole = full_ggn(module, [x])
    assert error(full_ggn(module, x.split(3)), whole) < EXACT
    assert error(full_ggn(module, [x], memory=1), whole) < EXACT  # one example at a time


def test_full_ggn_refuses_sequences() -> None:
    with pytest.raises(UsageError, match="must return logits"):
        full_ggn(nn.Linear(3, 4), [torch.ones(2, 5, 3)])


# ---- shards


def digits(classes: tuple[int, ...] = tuple(range(10)), size: int = 144) -> Shard:
    """The default model of VON, P = 650, and 144 digits."""
    inputs, targets = load_digits(return_X_y=True)
    rows = torch.isin(torch.tensor(targets), torch.tensor(classes))
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    x, y = torch.tensor(inputs, dtype=torch.float32)[rows][:size], torch.tensor(targets)[rows][:size]
    return Shard(net, x, y.long(), 16.0)


def test_gradient_and_curvature_of_a_shard_are_those_of_the_summed_loss() -> None:
    shard = digits(size=600)  # two chunks
    w = torch.randn(650, generator=torch.Generator().manual_seed(1))
    matrix, bias = w[:640].view(10, 64).double(), w[640:].double()
    x = torch.cat([shard.inputs.double() / 16, torch.ones(600, 1)], 1)
    p = (x[:, :64] @ matrix.T + bias).softmax(1)
    slope = (p - F.one_hot(shard.targets, 10)).T @ x
    assert error(shard.gradient(w), torch.cat([slope[:, :64].reshape(-1), slope[:, 64]])) < ROUNDING
    result = shard.full_curvature(w)
    assert error(result.diagonal(), shard.curvature(w, "exact", RNG)) < ROUNDING
    block = x[:, :64].T @ ((p[:, 2] * -p[:, 7])[:, None] * x[:, :64])
    assert error(result[2 * 64 : 3 * 64, 7 * 64 : 8 * 64], block) < ROUNDING


def test_dropout_is_off() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))
    shard = Shard(Net(module.train()), torch.randn(5, 3), torch.ones(5).long(), 1.0)
    w = torch.ones(8)
    assert torch.equal(shard.gradient(w), shard.gradient(w))
    module.train()
    second = shard.full_curvature(w)
    assert torch.equal(second, shard.full_curvature(w))


# ---- closed form


def quadratic(size: int = 6, seed: int = 0) -> QuadraticShard:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(20, size, generator=draws, dtype=torch.float64)
    return QuadraticShard(x.T @ x, x.T @ torch.randn(20, generator=draws, dtype=torch.float64), 20)


def random_pull(full: bool, size: int = 6) -> Gaussian:
    draws = torch.Generator().manual_seed(5)
    root = torch.randn(size, size, generator=draws, dtype=torch.float64)
    precision = root @ root.T + torch.eye(size).double()
    shift = torch.randn(size, generator=draws, dtype=torch.float64)
    return Gaussian(shift, precision if full else precision.diagonal().clone())


def objective(shard: QuadraticShard, cavity: Gaussian, temperature: float, m: Tensor, s: Tensor) -> float:
    """E_q[l] - E_q[log pull] + temperature * E_q[log q], without constants."""
    covariance = torch.linalg.inv(s if s.dim() == 2 else torch.diag(s))
    matrix = shard.hessian + (cavity.precision if is_full(cavity.precision) else torch.diag(cavity.precision))
    linear = shard.linear + cavity.shift
    expected = (m @ matrix @ m + (matrix * covariance).sum()) / 2 - linear @ m
    return float(expected - temperature * torch.logdet(covariance) / 2)


EXACTLY = VonTraining(optimiser="exact")


@pytest.mark.parametrize("temperature", [1.0, 0.2])
@pytest.mark.parametrize("full", [True, False])
def test_closed_form_is_stationary_and_minimal(full: bool, temperature: float) -> None:
    shard, cavity = quadratic(), random_pull(full)
    fit = von(shard, torch.zeros(6), how=EXACTLY, rng=RNG, cavity=cavity, temperature=temperature)
    m, s = fit.q.mean, fit.q.precision
    curvature = shard.full_curvature(m) if full else shard.curvature(m, "exact", RNG)
    assert error(temperature * s, cavity.precision + curvature) < EXACT
    pulled = cavity.precision @ m if full else cavity.precision * m
    assert error(shard.gradient(m) + pulled, cavity.shift) < 1e-12  # measured 1e-14: large terms cancel
    assert fit.loss == pytest.approx(shard.loss(m), rel=1e-12)
    least = objective(shard, cavity, temperature, m, s)
    draws = torch.Generator().manual_seed(9)
    for _ in range(50):
        dm = 1e-2 * torch.randn(6, generator=draws, dtype=torch.float64)
        root = 1e-2 * torch.randn(s.shape, generator=draws, dtype=torch.float64)
        ds = s @ root @ s + (s @ root @ s).T if full else s * root
        assert objective(shard, cavity, temperature, m + dm, s) > least
        assert objective(shard, cavity, temperature, m, s + 0.01 * ds) > least


# ---- the iteration


def prior(full: bool, scale: float) -> Gaussian:
    values = torch.full((650,), scale, dtype=torch.float64)
    return Gaussian(torch.linspace(-1, 1, 650).double(), torch.diag(values) if full else values)


def residuals(shard: Shard, local: Gaussian, cavity: Gaussian, temperature: float) -> tuple[float, float]:
    """Of mean and precision, under the samples of RNG's task, written out without von's helpers."""
    m, s = local.mean, local.precision
    assert isinstance(s, Tensor)
    half = torch.randn(2, 650, generator=RNG.torch("von"), dtype=torch.float64)
    eps = torch.cat([half, -half])
    full = s.dim() == 2
    points = m + (torch.linalg.solve(torch.linalg.cholesky(s).T, eps.T).T if full else eps / s.sqrt())
    gradient = torch.stack([shard.gradient(w).double() for w in points]).mean(0)
    curvature = [shard.full_curvature(w) if full else shard.curvature(w, "exact", RNG) for w in points]
    pulled = cavity.precision @ m if full else cavity.precision * m
    slope = gradient + pulled - cavity.shift
    target = (cavity.precision + torch.stack(curvature).double().mean(0)) / temperature
    return float(slope.norm() / (gradient.norm() + cavity.shift.norm())), error(s, target)


@pytest.mark.parametrize(
    ("full", "scale", "temperature", "classes"),
    [(True, 0.2, 0.2, (0, 1)), (False, 0.1, 1.0, tuple(range(10)))],
)
def test_defaults_reach_stationarity(
    full: bool, scale: float, temperature: float, classes: tuple[int, ...]
) -> None:
    """The stopping rule promises 1e-5 for both; from two starts the result is the same."""
    how = VonTraining()
    shard, cavity = digits(classes), prior(full, scale)
    starts = torch.zeros(650), torch.randn(650, generator=torch.Generator().manual_seed(2)) / 3
    fits = [von(shard, start, how=how, rng=RNG, cavity=cavity, temperature=temperature) for start in starts]
    for fit in fits:
        mean, precision = residuals(shard, fit.q, cavity, temperature)
        assert mean < 1.1e-5 and precision < 1.1e-5
    assert error(fits[1].q.mean, fits[0].q.mean) < 1e-4  # measured below 1e-5
    assert error(fits[1].q.precision, fits[0].q.precision) < 1e-4
    logits = shard.net.logits(fits[0].q.mean, shard.inputs / 16)
    assert fits[0].loss == pytest.approx(float(F.cross_entropy(logits, shard.targets)), rel=1e-5)


@pytest.mark.parametrize("full", [True, False])
def test_one_sample_is_the_delta_method(full: bool) -> None:
    shard, cavity = digits(), prior(full, 1.0)
    how = VonTraining(samples=1)
    local = von(shard, torch.zeros(650), how=how, rng=RNG, cavity=cavity, temperature=1.0).q
    m = local.mean
    curvature = shard.full_curvature(m) if full else shard.curvature(m, "exact", RNG)
    gradient = shard.gradient(m)
    assert error(local.precision, cavity.precision + curvature) < 1.1e-5
    assert (gradient + m - cavity.shift).norm() / (gradient.norm() + cavity.shift.norm()) < 1.1e-5


@pytest.mark.parametrize("full", [True, False])
def test_indefinite_pull_with_definite_sum(full: bool) -> None:
    """Duals make pull.precision indefinite where the data say more than q_g."""
    shard = digits()
    base = prior(full, 0.5)
    dual = 0.01 * shard.full_curvature(torch.zeros(650)).double()
    if not full:  # one bias, and slightly: the weights can nearly undo it, at the price of their prior
        dual = torch.zeros(650).double()
        dual[640] = 0.51
    cavity = Gaussian(base.shift, base.precision - dual)
    assert not cavity.is_proper
    fit = von(shard, torch.zeros(650), how=VonTraining(), rng=RNG, cavity=cavity, temperature=1.0)
    assert fit.q.is_proper
    assert max(residuals(shard, fit.q, cavity, 1.0)) < 1.1e-5


# ---- errors


@pytest.mark.parametrize("full", [True, False])
def test_a_precision_that_is_not_positive_is_an_error(full: bool) -> None:
    with pytest.raises(TaskError, match=r"not positive definite: \d+ of 650 .* raise rho"):
        von(digits(), torch.zeros(650), how=VonTraining(), rng=RNG, cavity=prior(full, -9.0), temperature=1.0)
    cavity = random_pull(full) ** -50
    with pytest.raises(TaskError, match=r"not positive definite: \d of 6 "):
        von(quadratic(), torch.zeros(6), how=EXACTLY, rng=RNG, cavity=cavity, temperature=1.0)


def test_numbers_that_are_not_finite_are_an_error() -> None:
    cavity = prior(False, 1.0)
    broken = Gaussian(cavity.shift * float("nan"), cavity.precision)
    with pytest.raises(TaskError, match="gradient is not finite"):
        von(digits(), torch.zeros(650), how=VonTraining(), rng=RNG, cavity=broken, temperature=1.0)
    start = torch.full((650,), float("nan"))
    with pytest.raises(TaskError, match="precision is not finite"):
        von(digits(), start, how=VonTraining(), rng=RNG, cavity=cavity, temperature=1.0)


def test_settings_that_do_not_fit() -> None:
    def solve(shard: Shard | QuadraticShard, how: VonTraining, cavity: Gaussian) -> None:
        von(shard, torch.zeros(len(cavity.shift)), how=how, rng=RNG, cavity=cavity, temperature=1.0)

    with pytest.raises(UsageError, match="optimiser=exact"):
        solve(quadratic(), VonTraining(), random_pull(True))
    with pytest.raises(UsageError, match="needs a quadratic loss"):
        solve(digits(), EXACTLY, prior(True, 1.0))
    with pytest.raises(UsageError, match="samples=3"):
        solve(digits(), VonTraining(samples=3), prior(False, 1.0))
    with pytest.raises(UsageError, match="isotropic"):
        solve(digits(), VonTraining(), Gaussian(torch.zeros(650), 1.0))
