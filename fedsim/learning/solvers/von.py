"""Variational online Newton (VON): a client's Gaussian, diagonal or full, from its loss and a cavity.

    q* = argmin_q  E_q[l_k] - E_q[log cavity] + temperature * E_q[log q]

Every client problem of PVI and of Bayesian-ADMM has this form: PVI with cavity = q_g / t_k and
temperature 1, ADMM with cavity = q_g**rho / t_k and temperature rho. The solution q = N(m, S^-1) satisfies

    temperature * S = cavity.precision + E_q[hess l_k]       (the Hessian's diagonal in the diagonal family)
    0 = E_q[grad l_k] + cavity.precision m - cavity.shift

Source: The Bayesian learning rule, Eq. 12, arXiv:2107.04562; Moellenhoff et al., Federated ADMM from Bayesian
Duality, App. D.2 (arXiv:2506.13150); toyexamples/admm.py of its release.
Differs: all steps use the same eps, so the result is a fixed point and not an average over the last draws.
Between two updates of S, L-BFGS preconditioned with S (nearly) solves for the mean, because the plain step
S^-1 grad diverges for a diagonal S, and for a full S far from the solution. The step size of S is adaptive.
The GGN replaces the Hessian. It is never indefinite, and equals the Hessian for linear models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.errors import TaskError, UsageError
from fedsim.learning.gaussian import Gaussian, is_full, times
from fedsim.learning.shards import QuadraticShard, Shard, check_optimiser
from fedsim.learning.solvers import LocalFit
from fedsim.seeds import RandomStream

TOLERANCE = 1e-5
"""VON stops if the relative residuals of mean and precision are smaller; float32 gradients reach 1e-6."""
MOVES = 20
"""Largest number of L-BFGS steps of the mean per update of the precision; L-BFGS remembers all of them."""


@dataclass(frozen=True)
class VonTraining:
    """Settings of VON, which finds a client's Gaussian.

    steps: largest number of updates of the precision; VON stops earlier when stationary. samples: number of
    weights at which expectations are taken, in antithetic pairs m +- S^-1/2 eps; 1: the mean itself (delta
    method). lr: first trial length of a step of the mean; 1 is Newton's. lr_precision: first step size of the
    precision. It halves if two successive corrections have opposite directions, else grows by half, up to 1.
    optimiser: 'exact' computes the minimiser in closed form, for clients whose loss is quadratic.
    """

    steps: Annotated[int, Meta(ge=1, description="most updates of the precision in one local training")] = 30
    samples: Annotated[
        int, Meta(ge=1, description="weights at which expectations are taken, in pairs; 1: the mean itself")
    ] = 4
    lr: Annotated[float, Meta(gt=0, le=1, description="first step of the mean; 1: Newton's")] = 1.0
    lr_precision: Annotated[
        float, Meta(gt=0, le=1, description="first step of the precision, which adapts; 1: a full update")
    ] = 0.5
    optimiser: Annotated[
        Literal["von", "exact"],
        Meta(description="of local training; exact: the minimiser in closed form, for quadratic losses"),
    ] = "von"


def von(
    shard: Shard | QuadraticShard,
    start: Tensor,
    *,
    how: VonTraining,
    rng: RandomStream,
    cavity: Gaussian,
    temperature: float,
) -> LocalFit[Gaussian, None]:
    """Return the client's q* (see the module), in the family of cavity.precision, (P,) or (P, P).

    The iteration begins at the mean `start` (P,), with the precision that is stationary there (delta method).
    `cavity` is a factor on the scale of the summed loss; its precision may be indefinite.

    Raises:
        TaskError: if cavity.precision + E[hess l_k] is not positive definite or a number is not finite.
        UsageError: if the cavity is isotropic, if the number of samples is odd and not 1, or if
            `how.optimiser` does not fit the client's loss.
    """
    if not isinstance(cavity.precision, Tensor) or cavity.precision.dim() not in (1, 2):
        raise UsageError("von needs a diagonal or a full precision, not an isotropic one")
    cavity = Gaussian(cavity.shift.double(), cavity.precision.double())
    check_optimiser(shard, how.optimiser, "von")
    if isinstance(shard, QuadraticShard):
        return _exact(shard, cavity, temperature)
    shard.net.refuse("VON decides by numbers of every step")
    eps = _draws(start, how.samples, rng)
    mean = start.double()
    precision = _stationary(shard, mean[None], cavity, temperature, rng)
    root = _Root.of(precision)
    step, last, residual = how.lr_precision, torch.zeros_like(precision), float("inf")
    for _ in range(how.steps):
        target = _stationary(shard, mean + root.spread(eps), cavity, temperature, rng)
        correction = target - precision
        if residual < TOLERANCE and float(correction.norm() / precision.norm()) < TOLERANCE:
            break
        agreement = float((correction * last).sum())  # 0 at the first step
        if agreement:
            step = step / 2 if agreement < 0 else min(1.0, 1.5 * step)
        last = correction
        precision = precision + step * correction
        root = _Root.of(precision)
        slope = partial(_slope, shard, around=root.spread(eps), cavity=cavity)
        mean, residual = _move(slope, mean, root, how.lr, temperature)
    return LocalFit(Gaussian.at(mean, precision), _mean_loss(shard, mean, rng))


def _exact(shard: QuadraticShard, cavity: Gaussian, temperature: float) -> LocalFit[Gaussian, None]:
    full, hessian = is_full(cavity.precision), shard.hessian.double()
    assert isinstance(cavity.precision, Tensor)
    precision = (cavity.precision + (hessian if full else hessian.diagonal())) / temperature
    _Root.of(precision)  # raises a TaskError if it is not positive definite
    # the mean needs the whole Hessian in both families
    matrix = hessian + (cavity.precision if full else torch.diag(cavity.precision))
    if not full:
        _Root.of(matrix)  # a saddle point is no solution, even with a positive diagonal
    mean = _finite(torch.linalg.solve_ex(matrix, cavity.shift + shard.linear.double()).result, "mean")
    return LocalFit(Gaussian.at(mean, precision), shard.loss(mean))


def check_samples(samples: int) -> None:
    """Raise a UsageError unless VON can draw this number of samples in pairs."""
    if samples > 1 and samples % 2:
        raise UsageError(f"samples={samples}: VON draws pairs; use an even number, or 1 for the mean alone")


def _draws(start: Tensor, samples: int, rng: RandomStream) -> Tensor:
    """Return eps (samples, P) float64, drawn on the CPU: pairs eps and -eps, or one row of zeros."""
    if samples == 1:
        return torch.zeros_like(start, dtype=torch.float64)[None]
    check_samples(samples)
    half = torch.randn((samples // 2, len(start)), generator=rng.torch("von"), dtype=torch.float64)
    return torch.cat([half, -half]).to(start.device)


def _stationary(
    shard: Shard, points: Tensor, cavity: Gaussian, temperature: float, rng: RandomStream
) -> Tensor:
    """Return (cavity.precision + E[hess l_k]) / temperature; E is the mean over `points` (n, P)."""
    assert isinstance(cavity.precision, Tensor)
    total = torch.zeros_like(cavity.precision)
    for w in points:
        total += shard.full_curvature(w) if total.dim() == 2 else shard.curvature(w, "exact", rng)
    return (cavity.precision + total / len(points)) / temperature


def _slope(shard: Shard, mean: Tensor, around: Tensor, cavity: Gaussian) -> tuple[Tensor, float]:
    """Return E[grad l_k] + cavity.precision m - cavity.shift, (P,), and its relative norm.
    The norm is relative to |E[grad l_k]| + |cavity.shift|."""
    gradient = torch.zeros_like(mean)
    for offset in around:
        gradient += shard.gradient(mean + offset)
    gradient /= len(around)
    slope = _finite(gradient + times(cavity.precision, mean) - cavity.shift, "gradient")
    scale = gradient.norm() + cavity.shift.norm()
    return slope, float(slope.norm() / scale.clamp(min=1e-300))


def _move(
    slope: Callable[[Tensor], tuple[Tensor, float]], mean: Tensor, root: _Root, lr: float, temperature: float
) -> tuple[Tensor, float]:
    """Run L-BFGS from `mean` until the residual has fallen tenfold; return the new mean and its residual.

    If the objective is convex, its slope increases along a search direction. A trial step that overshoots is
    shortened to the zero of the straight line through both slopes. If the slope does not increase, which is
    possible for an indefinite cavity or a network, the trial is shortened by a fixed factor.
    """
    here, before = slope(mean)
    residual = before
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(MOVES):
        if residual < max(TOLERANCE, 0.1 * before):
            break
        direction = -_inverse(pairs, here, root, temperature)
        down = float(direction @ here)
        if down >= 0:  # not downhill, because of rounding errors in the pairs
            pairs, direction = [], -root.solve(here) / temperature
            down = float(direction @ here)
        length = lr
        for _ in range(8):
            there, residual = slope(mean + length * direction)
            after = float(direction @ there)
            if down <= after <= -0.9 * down:
                break
            length *= max(0.1, down / (down - after)) if after > down else 0.3
        change, bend = length * direction, there - here
        if float(change @ bend) > 1e-6 * float(change.norm() * bend.norm()):
            pairs.append((change, bend))
        mean, here = mean + change, there
    return mean, residual


def _inverse(pairs: list[tuple[Tensor, Tensor]], vector: Tensor, root: _Root, temperature: float) -> Tensor:
    """Apply L-BFGS's inverse Hessian (two loops), from pairs (change, bend) and (temperature S)^-1."""
    shares = []
    for change, bend in reversed(pairs):
        shares.append((change @ vector) / (change @ bend))
        vector = vector - shares[-1] * bend
    vector = root.solve(vector) / temperature
    for (change, bend), share in zip(pairs, reversed(shares), strict=True):
        vector = vector + (share - (bend @ vector) / (change @ bend)) * change
    return vector


@dataclass(frozen=True)
class _Root:
    """A square root of S: L (P, P) with S = L L', or the roots (P,) of a diagonal."""

    values: Tensor

    @staticmethod
    def of(precision: Tensor) -> _Root:
        """Return the square root of S after checking that S is positive definite and finite."""
        _finite(precision, "precision")
        if precision.dim() == 1:
            bad, least = int((precision <= 0).sum()), float(precision.min())
            if not bad:
                return _Root(precision.sqrt())
        else:
            values, info = torch.linalg.cholesky_ex(precision)
            if not int(info):
                return _Root(values)
            eigenvalues = torch.linalg.eigvalsh(precision)
            bad, least = int((eigenvalues <= 0).sum()), float(eigenvalues[0])
        raise TaskError(
            f"von: the precision is not positive definite: {bad} of {len(precision)} eigenvalues are not "
            f"positive, the smallest is {least:.3g}; raise rho, so that the cavity outweighs the dual"
        )

    def solve(self, vector: Tensor) -> Tensor:
        """Return S^-1 x."""
        if self.values.dim() == 1:
            return vector / self.values.square()
        solution: Tensor = torch.cholesky_solve(vector[:, None], self.values)[:, 0]
        return solution

    def spread(self, eps: Tensor) -> Tensor:
        """Return the offsets S^-1/2 eps of the rows of `eps` (n, P), which vary smoothly with S."""
        if self.values.dim() == 1:
            return eps / self.values
        offsets: Tensor = torch.linalg.solve_triangular(self.values.T, eps.T, upper=True).T
        return offsets


def _finite(values: Tensor, what: str) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise TaskError(f"von: the {what} is not finite; raise rho or lower lr and lr_precision")
    return values


def _mean_loss(shard: Shard, mean: Tensor, rng: RandomStream) -> float:
    """Return the mean loss in nats per example."""
    total = 0.0
    for inputs, targets in shard.batches(shard.chunk, rng.torch("loss")):
        total += float(shard.net.likelihood.loss(shard.net.logits(mean, inputs), targets)) * len(targets)
    return total / shard.size
