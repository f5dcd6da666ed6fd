"""IVON against the package ivon-opt bit for bit, and against closed forms.

Relative errors are |found - exact| / |exact|; tolerances are about 100 times what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from ivon import IVON
from torch import Tensor, nn

from fedsim.errors import TaskError, UsageError
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.params import Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers.ivon import IvonFit, IvonTraining, _Ivon, ivon
from fedsim.seeds import RandomStream, seeded_torch

N = 26
LAMBDA = 40.0
STEPS = IvonTraining(epochs=12, batch_size=6, lr=0.05, h0=0.05, beta2=0.98)
"""Five batches an epoch, the last of two examples: 60 steps, in which h turns over."""
RNG = RandomStream(3, "ivon-test", 1, 0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a worker. Networks this small spend most of two threads' time in waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network() -> nn.Module:
    with seeded_torch(0):
        return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


@pytest.fixture
def shard() -> Shard:
    torch.manual_seed(1)
    return Shard(Net(network()), torch.randn(N, 7), torch.randint(5, (N,)), 1.0)


def flat(value: float, like: Tensor) -> Tensor:
    return torch.full_like(like, value, dtype=torch.float64)


def solve(shard: Shard, how: IvonTraining = STEPS, prior: float = 2.0, **supplied: Any) -> IvonFit:
    """From the network's initialisation, with the prior N(0, 1/prior)."""
    start = Net(network()).snapshot()
    terms = {
        "rng": RNG,
        "round": 1,
        "prior_mean": flat(0.0, start),
        "prior_precision": flat(prior, start),
        "ess": LAMBDA,
        "h0": how.h0,
    }
    return ivon(shard, supplied.pop("start", start), how=how, **(terms | supplied))


class Stock:
    """ivon-opt on the ordinary module, fed the noise and the batches of a stream."""

    def __init__(self, how: IvonTraining, prior: float = 2.0) -> None:
        self.module, self.how = network(), how
        self.optimiser = IVON(
            self.module.parameters(),
            lr=how.lr,
            ess=LAMBDA,
            hess_init=how.h0,
            beta1=how.beta1,
            beta2=how.beta2,
            weight_decay=prior / LAMBDA,
            mc_samples=how.samples,
            rescale_lr=False,
        )

    def train(self, shard: Shard, rng: RandomStream) -> None:
        order = rng.torch("batches")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key("ivon"))
            for _ in range(self.how.epochs):
                for inputs, targets in shard.batches(self.how.batch_size, order):
                    for _ in range(self.how.samples):
                        with self.optimiser.sampled_params(train=True):
                            self.optimiser.zero_grad()
                            F.cross_entropy(self.module(inputs), targets).backward()
                    self.optimiser.step()

    @property
    def group(self) -> dict[str, Any]:
        return self.optimiser.param_groups[0]

    def same(self, fit: IvonFit) -> bool:
        mean = torch.cat([p.detach().flatten() for p in self.module.parameters()])
        precision = self.group["ess"] * (self.group["hess"] + self.group["weight_decay"])
        assert fit.carried is not None
        return (
            torch.equal(fit.solution.mean, mean)
            and torch.equal(fit.solution.precision, precision)
            and torch.equal(fit.carried.momentum, self.group["momentum"])
            and fit.carried.steps == self.optimiser.current_step
        )


# ---- against ivon-opt


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("dual", [None, "zero"])
def test_with_a_scalar_prior_and_no_dual_it_is_ivon_opt_bit_for_bit(
    shard: Shard, samples: int, dual: str | None
) -> None:
    how = replace(STEPS, samples=samples)
    stock = Stock(how)
    stock.train(shard, RNG)
    zero = torch.zeros_like(shard.net.weights)
    fit = solve(shard, how, dual=Gaussian(zero, zero) if dual else None)
    assert stock.same(fit)
    assert (fit.solution.precision / (LAMBDA * how.h0 + 2) - 1).abs().median() > 0.1  # the curvature did move


def test_momentum_and_step_count_carry_over_as_in_one_optimiser_whose_curvature_restarts(
    shard: Shard,
) -> None:
    stock = Stock(STEPS)
    stock.train(shard, RNG)
    first = solve(shard)
    later = replace(RNG, round=2)
    stock.group["hess"].zero_()
    stock.train(shard, later)
    later_task = {"start": first.solution.mean, "rng": later, "h0": None}
    second = solve(shard, moments=first.carried, **later_task)
    assert stock.same(second)
    assert second.carried is not None and second.carried.steps == 120

    reset = solve(shard, replace(STEPS, carry=False), moments=first.carried, **later_task)
    fresh = solve(shard, **later_task)
    assert reset.carried is None
    assert torch.equal(reset.solution.mean, fresh.solution.mean)
    assert not torch.equal(reset.solution.mean, second.solution.mean)


def test_a_curvature_per_coordinate_is_where_it_starts_and_h_is_returned(shard: Shard) -> None:
    stock = Stock(STEPS)
    h0 = torch.rand(len(shard.net.weights), generator=torch.Generator().manual_seed(1))
    stock.group["hess"] = h0.clone()
    stock.train(shard, RNG)
    before = h0.clone()
    fit = solve(shard, h0=h0, curvature=True)
    assert stock.same(fit)
    assert fit.solution.curvature is not None
    assert torch.equal(fit.solution.curvature, stock.group["hess"])
    assert torch.equal(h0, before)
    assert solve(shard, h0=h0).solution.curvature is None


def test_h_is_returned_without_the_prior_where_coordinates_store_the_sum(shard: Shard) -> None:
    """With a vector prior and duals, h falls below -d/2 in some coordinates, which then store h + d."""
    prior, dual = vector_terms(len(shard.net.weights))
    d = prior.precision / LAMBDA
    dual = Gaussian(dual.shift, 0.8 * d)
    terms = {"prior_mean": prior.mean, "prior_precision": prior.precision, "dual": dual}
    fit = solve(shard, curvature=True, **terms)
    assert fit.solution.curvature is not None
    assert (fit.solution.curvature < -d / 2).any()
    error = LAMBDA * (fit.solution.curvature + d) - fit.solution.precision
    assert (error.abs() / (LAMBDA * d)).max() < 1e-6  # a few roundings of float32


# ---- the fixed point


def hadamard(side: int) -> Tensor:
    """(side, side) of +1 and -1 with orthogonal columns, the first all ones; side a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < side:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


class Quadratic:
    """A random problem with lbar(th) = 1/2 th'A th - b'th in d dimensions, vector prior and duals."""

    ess = 37.0

    def __init__(self, d: int) -> None:
        g = torch.Generator().manual_seed(d)
        randn: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, generator=g).double()  # noqa: E731
        rand = lambda: torch.rand(d, generator=g).double()  # noqa: E731
        root = randn(d, d)
        self.hessian = root @ root.T / d + 0.5 * torch.eye(d)
        self.linear, self.prior_mean = randn(d), randn(d)
        self.prior_precision = 1 + 20 * rand()
        self.dual = Gaussian(0.3 * randn(d), 0.5 * rand() - 0.15)
        self.d = self.prior_precision / self.ess

    def closed_form(self) -> tuple[Tensor, Tensor]:
        u = self.dual.precision
        precision = self.ess * (self.hessian.diagonal() - u + self.d)
        right = self.linear - self.dual.shift + self.d * self.prior_mean
        return torch.linalg.solve(self.hessian + torch.diag(self.d - u), right), precision

    def steps(self, **changed: Any) -> _Ivon:
        supplied = {"lr": 0.1, "beta1": 0.9, "beta2": 0.98, "h": 1.0, "moments": None} | changed
        return _Ivon(
            Net(nn.Linear(1, 1)),
            torch.zeros_like(self.linear),
            steps=0,
            ess=self.ess,
            prior_mean=self.prior_mean,
            prior_precision=self.prior_precision,
            dual=self.dual,
            **supplied,
        )

    def run(self, state: _Ivon, steps: int) -> _Ivon:
        """Sign vectors with mean exactly 0 and second moment exactly I make sample means exact."""
        d = len(self.linear)
        signs = hadamard(32 if d > 1 else 2)[:, 1 : d + 1]
        weights = torch.empty_like(self.linear)
        for _ in range(steps):
            for row in signs:
                state.sample(row.clone(), out=weights)
                state.accumulate(torch.mv(self.hessian, weights).sub_(self.linear))
            state.step()
        return state


def error(result: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.vector_norm(result - exact) / torch.linalg.vector_norm(exact))


def test_its_fixed_point_is_the_minimum_of_the_objective() -> None:
    problem = Quadratic(20)
    mean, precision = problem.closed_form()
    state = problem.run(problem.steps(), 1500)
    assert error(state.mean, mean) < 2e-13  # measured 2e-15
    assert error(state.precision(), precision) < 2e-12  # measured 2e-14


# ---- h next to -d


def without_prior_mean(d: Tensor, u: Tensor | None, beta2: float) -> _Ivon:
    """At rest at m = m_p = 0, h = 0; lambda = 1."""
    zero = torch.zeros_like(d)
    return _Ivon(
        Net(nn.Linear(1, 1)),
        zero,
        steps=0,
        lr=0.0,
        beta1=0.9,
        beta2=beta2,
        ess=1.0,
        prior_mean=zero,
        prior_precision=d,
        dual=None if u is None else Gaussian(zero, u),
        h=0.0,
        moments=None,
    )


VECTOR = torch.logspace(-6, 1, 500)


def starved(excess: float, d: Tensor = VECTOR, *, duals: bool = True) -> Tensor:
    """(h + d) / d after 1000 steps at b2 = .98 with hhat = -(1 + excess) d, from duals or from the data."""
    state = without_prior_mean(d, d.double() * (1 + excess) if duals else None, 0.98)
    for _ in range(1000):
        state.sample(torch.ones_like(d), out=torch.empty_like(d))
        state.accumulate(0 * d if duals else -(1 + excess) * d / state.total.sqrt())
        state.step()
    return (state.total / d).double()


def expected(excess: float) -> float:
    """excess 0: the factor 1 + x + x^2/2 at x = -(1 - b2), 1000 times; else it rests at x = -2."""
    return excess * 0.02 / 1.98 if excess else (1 - 0.02 + 0.02**2 / 2) ** 1000


@pytest.mark.parametrize(
    ("excess", "d", "duals"),
    [
        (0.0, VECTOR, True),  # as under cap_dual
        (1e-4, VECTOR, True),
        (1.0, VECTOR, True),
        (1e-4, torch.full((20,), 0.3), True),
        (1e-2, VECTOR, False),  # measured 2e-4; apart 2e-2
    ],
)
def test_h_plus_d_stays_positive_and_accurate_next_to_zero(excess: float, d: Tensor, duals: bool) -> None:
    result = starved(excess, d, duals=duals)
    assert result.min() > 0
    assert error(result, torch.full_like(result, expected(excess))) < 2e-3


# ---- the whole solver


def vector_terms(size: int) -> tuple[Gaussian, Gaussian]:
    """A prior (mean and precision per coordinate) and duals of both signs."""
    g = torch.Generator().manual_seed(9)
    mean, spread = torch.randn(size, generator=g).double(), torch.rand(size, generator=g).double()
    prior = Gaussian.at(0.1 * mean, 1 + 4 * spread)
    return prior, Gaussian(0.01 * mean.flip(0), 0.02 * spread.flip(0) - 0.005)


@pytest.mark.parametrize(
    ("noise", "equal"),
    [("independent", (False, False)), ("common_per_round", (True, False)), ("common", (True, True))],
)
def test_common_noise_is_the_same_for_all_clients_of_a_round_or_of_all_rounds(
    shard: Shard, noise: Literal["independent", "common", "common_per_round"], equal: tuple[bool, bool]
) -> None:
    """Two clients with the same data: with common noise, and only then, they send the same."""
    how = replace(STEPS, epochs=1, noise=noise)

    def mean(round: int, client: int) -> Tensor:
        rng = RandomStream(3, "client.1", round, client)
        return solve(shard, how, rng=rng).solution.mean

    one = mean(1, 0)
    assert torch.equal(one, mean(1, 0))
    assert (torch.equal(one, mean(1, 1)), torch.equal(one, mean(2, 0))) == equal


def test_the_learning_rate_falls_along_a_cosine_and_stays_at_zero(shard: Shard) -> None:
    how = IvonTraining(lr=0.2, cosine_rounds=50)
    assert [how.lr_in(r) for r in (1, 26, 51, 80)] == pytest.approx([0.2, 0.1, 0.0, 0.0], abs=1e-15)
    assert IvonTraining(lr=0.2).lr_in(51) == 0.2

    weights = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weights], lr=0.2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=50)
    for r in range(1, 51):
        assert how.lr_in(r) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-10)
        optimiser.step()
        scheduler.step()

    halfway, beyond = (solve(shard, replace(STEPS, cosine_rounds=10), round=r) for r in (6, 11))
    half = solve(shard, replace(STEPS, lr=STEPS.lr / 2))
    torch.testing.assert_close(halfway.solution.mean, half.solution.mean, rtol=1e-4, atol=1e-5)
    assert torch.equal(beyond.solution.mean, Net(network()).snapshot())


# ---- the closed form


EXACT = IvonTraining(optimiser="exact")


def closed(problem: Quadratic, size: int = 7, **changed: Any) -> IvonFit:
    supplied = {
        "rng": RNG,
        "round": 1,
        "prior_mean": problem.prior_mean,
        "prior_precision": problem.prior_precision,
        "ess": problem.ess,
        "dual": problem.dual,
    } | changed
    shard = QuadraticShard(problem.hessian * size, problem.linear * size, size)
    return ivon(shard, torch.zeros_like(problem.linear), how=EXACT, **supplied)


def objective(problem: Quadratic, mean: Tensor, precision: Tensor) -> float:
    """F, up to a constant."""
    variance, s_p = 1 / precision, problem.prior_precision
    u, v = problem.dual.precision, problem.dual.shift
    loss = mean @ problem.hessian @ mean / 2 - problem.linear @ mean
    loss += (problem.hessian.diagonal() * variance).sum() / 2
    site = v @ mean - (u * (mean.square() + variance)).sum() / 2
    divergence = (s_p * (variance + (mean - problem.prior_mean).square()) + precision.log()).sum() / 2
    return float(problem.ess * (loss + site) + divergence)


def test_the_closed_form_is_the_minimum_of_the_objective() -> None:
    problem = Quadratic(20)
    fit = closed(problem)
    mean, precision = problem.closed_form()
    assert error(fit.solution.mean, mean) < 1e-13 and error(fit.solution.precision, precision) < 1e-13
    assert fit.carried is None and fit.solution.curvature is not None
    assert error(fit.solution.curvature, problem.hessian.diagonal() - problem.dual.precision) < 1e-14
    at_mean = float(mean @ problem.hessian @ mean / 2 - problem.linear @ mean)
    assert fit.loss == pytest.approx(at_mean, rel=1e-12)
    lowest = objective(problem, fit.solution.mean, fit.solution.precision)
    g = torch.Generator().manual_seed(4)
    for _ in range(50):
        step = 1e-3 * torch.randn(2, 20, generator=g).double()
        assert objective(problem, fit.solution.mean + step[0], fit.solution.precision) > lowest
        assert objective(problem, fit.solution.mean, fit.solution.precision * step[1].exp()) > lowest


# ---- errors


def test_an_optimiser_that_does_not_fit_the_loss_is_a_usage_error(shard: Shard) -> None:
    with pytest.raises(UsageError, match="needs a quadratic loss; use ivon"):
        solve(shard, EXACT)
    problem = Quadratic(2)
    with pytest.raises(UsageError, match="--set optimiser=exact"):
        ivon(
            QuadraticShard(problem.hessian, problem.linear),
            problem.linear,
            how=STEPS,
            rng=RNG,
            round=1,
            prior_mean=problem.prior_mean,
            prior_precision=problem.prior_precision,
            ess=1.0,
        )


def test_duals_beyond_curvature_and_prior_are_a_task_error() -> None:
    problem = Quadratic(5)
    u = problem.dual.precision.clone()
    u[2:4] = problem.hessian.diagonal()[2:4] + problem.d[2:4] + 1.0
    with pytest.raises(TaskError, match=r"in 2 of 5 coordinates \(smallest -37\).*raise rho.*cap_dual"):
        closed(problem, dual=Gaussian(problem.dual.shift, u))


def test_a_saddle_is_a_task_error_though_every_precision_is_positive() -> None:
    problem = Quadratic(2)
    problem.hessian = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    dual = Gaussian(problem.dual.shift, problem.d + 0.5)
    with pytest.raises(TaskError, match=r"in 1 of 2 directions \(smallest eigenvalue -0.4\).*raise rho"):
        closed(problem, dual=dual)


def test_a_mean_that_is_not_finite_is_a_task_error(shard: Shard) -> None:
    problem = Quadratic(4)
    mean = problem.prior_mean.clone()
    mean[1] = math.inf
    with pytest.raises(TaskError, match=r"mean is not finite in 4 of 4 coordinates"):
        closed(problem, prior_mean=mean)
    with pytest.raises(TaskError, match=r"mean is not finite in \d+ of 174 coordinates.*lower lr"):
        solve(shard, replace(STEPS, lr=1e30))


def test_a_start_that_is_no_distribution_is_a_task_error(shard: Shard) -> None:
    precision = flat(1.0, shard.net.weights)
    precision[3] = -2.5
    with pytest.raises(TaskError, match=r"in 1 of \d+ coordinates \(smallest -2.5\)"):
        solve(shard, prior_precision=precision, h0=None)


def test_a_loss_that_overflows_at_a_finite_mean_is_a_task_error(shard: Shard) -> None:
    broken = replace(shard, inputs=shard.inputs * math.nan)
    with pytest.raises(TaskError, match="not finite"):
        solve(broken)
