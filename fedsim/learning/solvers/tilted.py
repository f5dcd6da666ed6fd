"""The step of an EP client: mean and variances (P,) of the tilted distribution exp(-l_k) * cavity.

laplace     the mode, and the diagonal of the curvature at the mode
langevin    mean and variances of a Markov chain, preconditioned by the curvature S (P, P) at the mode

    w <- w - (step / 2) S^-1 g(w) + noise                      g: the gradient of l_k - log cavity
    u <- u - (step / 2) S^-1 (g(mode) + S (u - mode)) + noise  noise: sqrt(step) S^-1/2 (xi + xi') / 2

The chain w uses full gradients and starts from N(mode, S^-1). Every noise vector enters two successive steps
(Leimkuhler and Matthews 2013, https://arxiv.org/abs/1203.5428), so the step size causes no error in the
variance of a Gaussian.

The chain u has the same start and noise, but its target is N(m, S^-1) with m = mode - S^-1 g(mode). The
moments of this Gaussian are known, so u serves as a control variate (Owen 2013, Monte Carlo theory, methods
and examples, Sec. 8.9, https://artowen.su.domains/mc/):

    mean = m + mean(w - u)        variance = diag(S^-1) var(w) / var(u)

Both estimates are exact for a quadratic loss, even if the mode is inaccurate, and for every weight that the
loss does not depend on. The inverse of var(w) alone would be too large on average, and a product of K sites
amplifies this error without bound (docs/decisions/045-moments-by-a-control-variate.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.errors import TaskError, UsageError
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.first_order import LocalTraining, Moments, minimise
from fedsim.seeds import RandomStream

__all__ = ["Chain", "LocalTraining", "check_chain", "tilted_moments"]

MAX_CHAIN = 3000
"""Largest number of parameters P for which a chain can run, because S is a (P, P) matrix."""


@dataclass(frozen=True)
class Chain:
    """Settings of the Langevin chain. A step costs a gradient over all examples and gives one sample.

    shrinkage: the Gaussian at the mode enters the moments with the weight of this many samples.
    """

    samples: Annotated[int, Meta(ge=1, description="steps of the chain, each a sample")] = 50
    step: Annotated[
        float, Meta(gt=0, lt=4, description="of the chain, in units of the variance at the mode")
    ] = 1.0
    shrinkage: Annotated[
        float, Meta(ge=0, description="samples that the Gaussian at the mode counts as in the moments")
    ] = 10.0


def check_chain(params: int, chain: Chain) -> None:
    """Raise a UsageError unless a chain can run for a model of `params` parameters."""
    if params > MAX_CHAIN:
        raise UsageError(
            f"the chain needs the curvature of P = {params:,} parameters as a P x P matrix; the limit is "
            f"P = {MAX_CHAIN:,}. Use --set moments=laplace, or a smaller model, such as --model logistic_bias"
        )
    if chain.samples + chain.shrinkage <= 1:
        raise UsageError("one sample has no variance; raise samples or shrinkage")


def tilted_moments(
    shard: Shard | QuadraticShard,
    start: Tensor,
    *,
    cavity: Gaussian,
    how: LocalTraining,
    chain: Chain | None,
    rng: RandomStream,
    round: int,
    moments: Moments | None = None,
) -> LocalFit[Gaussian, Moments]:
    """Return N(mean, diag(precision)^-1), float64, for exp(-l_k) * cavity with a diagonal, positive cavity.

    how: settings of the search for the mode from `start` (P,). chain: None means Laplace. On a QuadraticShard
    no chain runs, because the moments of the Gaussian are exact.

    Raises:
        UsageError: if the optimiser does not fit the client's loss.
        TaskError: if the chain diverges.
    """
    size = float(shard.size)
    fit = minimise(
        shard, start, how=how, rng=rng, round=round, weight=size, penalties=(cavity,), moments=moments
    )
    mode, least = fit.weights.double(), torch.as_tensor(cavity.precision)
    if chain is None:
        precision = shard.curvature(fit.weights, "exact", rng) + least
        return LocalFit(Gaussian.at(mode, precision), fit.loss, fit.carried)
    S = shard.full_curvature(fit.weights).double() + torch.diag(least)
    root = torch.linalg.cholesky(S)
    mean, variance = mode, torch.cholesky_inverse(root).diagonal()
    if isinstance(shard, Shard):
        mean, variance = _sampled(shard, mode, root, variance, cavity, chain, rng.torch("chain"))
    return LocalFit(Gaussian.at(mean, 1 / variance), fit.loss, fit.carried)


def _sampled(
    shard: Shard,
    mode: Tensor,
    root: Tensor,
    variance: Tensor,
    cavity: Gaussian,
    chain: Chain,
    draws: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Estimate mean and variance, each (P,), by the chain and its control variate.

    root: L, (P, P), with S = L L'. variance: diag(S^-1), (P,).
    """

    def noise() -> Tensor:
        """Return a draw of N(0, S^-1), (P,)."""
        xi = torch.randn((len(mode), 1), generator=draws, dtype=torch.float64).to(mode.device)
        drawn: Tensor = torch.linalg.solve_triangular(root.mT, xi, upper=True)[:, 0]
        return drawn

    def drift(w: Tensor) -> Tensor:
        """Return S^-1 g(w), (P,)."""
        slope = shard.gradient(w).double()
        cavity.add_gradient(w, slope)
        solved: Tensor = torch.cholesky_solve(slope[:, None], root)[:, 0]
        return solved

    step, newton = chain.step, drift(mode)
    both, after = noise().repeat(2, 1), noise()  # w - mode and u - mode, (2, P)
    first, second = torch.zeros_like(both), torch.zeros_like(both)
    for _ in range(chain.samples):
        before, after = after, noise()
        slopes = torch.stack((drift(mode + both[0]), newton + both[1]))
        both = both - step / 2 * slopes + step**0.5 * (before + after) / 2
        first, second = first + both, second + both**2
    # both variances include the Gaussian's, so they are positive and the error of their ratio is small
    own, known = chain.shrinkage * variance + second - first**2 / chain.samples
    mean = mode - newton + (first[0] - first[1]) / (chain.shrinkage + chain.samples)
    variances = variance * (own / known)
    if not bool(mean.isfinite().all() and variances.isfinite().all()):
        raise TaskError("the Langevin chain of the tilted distribution diverges; lower step")
    return mean, variances
