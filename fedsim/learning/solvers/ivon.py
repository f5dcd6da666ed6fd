"""A client's variational local solver: IVON on flat vectors, with duals and one prior per coordinate.

Algorithm 2 of Federated ADMM from Bayesian Duality (arXiv:2506.13150) minimises over q = N(m, diag sigma^2)

    F(q) = lambda E_q[ lbar(th) + v'th - 1/2 th'diag(u)th ] + KL( q || N(m_p, 1/s_p) )

with lbar the mean loss in nats per example, lambda the effective sample size, and v and u the duals' shift
and precision. h is the curvature of lbar, and d = s_p / lambda is the prior's precision in the units of h.
The precision of q is 1/sigma^2 = lambda (h + d). Without duals and with a prior N(0, 1/s), the package
ivon-opt gives the same bits (docs/decisions/008-own-ivon.md).

Generalised variational inference (FedGVI, arXiv:2502.00846) replaces lbar by another loss, and the KL and the
duals by D_alpha(q || p). The cavity p is N(m_p, 1/s_p) divided by the dual.

    D_alpha(q || p) = log( int q^alpha p^(1-alpha) ) / (alpha (alpha - 1)),    the KL(q || p) for alpha -> 1

Let q and p be diagonal Gaussians with means m and m_c and precisions s and s_c. Let r = s_c (m - m_c) be the
gradient of -log p at m. D_alpha plus an expected loss with gradient g and curvature H is stationary where

    0 = g + w r ;   s = alpha H + w s_c + alpha (alpha - 1) (w r)^2 ;   w = 1 / (alpha + (1 - alpha) s_c / s)

Every step moves q towards this point. s_c/s is capped at 1, because D_alpha is infinite for
s_c/s >= alpha/(alpha - 1).

Differs: line 6 divides the momentum by 1 - beta1^t, as ivon-opt and the paper's released code do; Algorithm 2
as printed does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.errors import TaskError
from fedsim.hyperparameters import BatchSize, DropLast, Epochs
from fedsim.learning.gaussian import Gaussian, diagonal
from fedsim.learning.ownership import owned
from fedsim.learning.params import Net
from fedsim.learning.robust_losses import RobustLoss
from fedsim.learning.shards import QuadraticShard, Shard, check_optimiser
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.epochs import batches, run_epochs
from fedsim.seeds import RandomStream

GENERALISED = 100
"""Number of fixed-point iterations for D_alpha with a quadratic loss, from the solution with the KL."""


@dataclass(frozen=True)
class IvonTraining:
    """Settings of IVON; the defaults are for the small network of the README's first command.

    The released configurations have other values of lr, h0 and beta2.
    lr: factor of the natural gradient, which is in units of the weights; 1 is a Newton step.
    h0: curvature of the mean loss, in nats per squared unit of weight, assumed at the start of the first
    local training. Later ones start at h = 0, so at the prior's precision, as in the released code.
    samples: Monte-Carlo samples of the weights per step.
    carry: if true, each client keeps momentum and step count between rounds, as in the released code.
    cosine_rounds: number of rounds over which lr falls to 0 along half a cosine; 0: lr is constant.
    noise: the tasks that share random numbers (samples, batch order, dropout). 'independent': none.
    'common': all clients in all rounds, as in the released code, which reseeds torch before every client's
    training. 'common_per_round': all clients of a round (docs/recipes/ivon_noise.toml measures the effect).
    optimiser: 'exact' computes the minimiser in closed form, for clients whose loss is quadratic.

    Examples:
        >>> import fedsim
        >>> how = fedsim.IvonTraining(lr=0.1, cosine_rounds=10)
        >>> how.lr_in(1), how.lr_in(6)
        (0.1, 0.05)
    """

    epochs: Epochs = 5
    batch_size: BatchSize = 32
    lr: Annotated[float, Meta(gt=0, description="factor of the natural gradient; 1 is a Newton step")] = 0.05
    h0: Annotated[
        float, Meta(gt=0, description="curvature of the mean loss assumed at the start of the first training")
    ] = 0.1
    beta1: Annotated[float, Meta(ge=0, lt=1, description="average of gradients: share of the old")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="average of curvatures: share of the old")] = 0.999
    samples: Annotated[int, Meta(ge=1, description="draws of the weights per step")] = 1
    carry: Annotated[
        bool, Meta(description="momentum and step count continue from the last task; false: from zero")
    ] = True
    cosine_rounds: Annotated[
        int, Meta(ge=0, description="lr falls to 0 along half a cosine over so many rounds; 0: constant")
    ] = 0
    noise: Annotated[
        Literal["independent", "common", "common_per_round"],
        Meta(description="draws of every client and round, or common ones, in all rounds or in one"),
    ] = "independent"
    optimiser: Annotated[
        Literal["ivon", "exact"],
        Meta(description="of local training; exact: the minimiser in closed form, for quadratic losses"),
    ] = "ivon"
    drop_last: DropLast = False

    def stream(self, task: RandomStream) -> RandomStream:
        """Return the random stream of a task's training, according to `noise`."""
        if self.noise == "independent":
            return task
        round = task.round if self.noise == "common_per_round" else 0
        return RandomStream(task.seed, f"{task.purpose} of all clients", round)

    def lr_in(self, round: int) -> float:
        """Return the learning rate of round 1, 2, ...: CosineAnnealingLR with a step per round, then 0."""
        if not self.cosine_rounds:
            return self.lr
        done = min((round - 1) / self.cosine_rounds, 1.0)
        return self.lr * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class IvonMoments:
    """The running mean of gradients (P,) float32 and the number of steps taken.

    Examples:
        >>> import fedsim, torch
        >>> fedsim.IvonMoments(momentum=torch.zeros(2), steps=0).steps
        0
    """

    momentum: Tensor
    steps: int


@dataclass(frozen=True)
class MeanPrecision:
    """A diagonal Gaussian: its mean (P,) and precision (P,), both in the dtype of the weights.

    curvature: h (P,), in nats per example and squared unit of weight, or None; with a dual, h - u.
    """

    mean: Tensor
    precision: Tensor
    curvature: Tensor | None = None


IvonFit = LocalFit[MeanPrecision, IvonMoments]
"""The result of `ivon`. loss: the average over the last epoch at the sampled weights, or for 'exact' the loss
at q's mean; without prior and duals. info: `moved` = 1 - beta2^steps, the fraction of its distance to a
stationary point that h has covered."""


def ivon(
    shard: Shard | QuadraticShard,
    start: Tensor,
    *,
    how: IvonTraining,
    rng: RandomStream,
    round: int,
    prior_mean: Tensor,
    prior_precision: Tensor,
    ess: float,
    dual: Gaussian | None = None,
    h0: float | Tensor | None = None,
    moments: IvonMoments | None = None,
    loss: RobustLoss | None = None,
    alpha: float = 1.0,
    curvature: bool = False,
) -> IvonFit:
    """Minimise F from the mean `start` (P,) and the precision ess * (h0 + d); h0 None means h = 0.

    prior_mean: m_p, (P,). prior_precision: s_p, (P,). ess: lambda. dual: diagonal factor with F's shift v and
    precision u. F adds log dual to the mean loss, so u lowers the curvature. h0: a number, or (P,). moments:
    used only if `how.carry`. loss: replaces lbar, also in the fit's loss. alpha: the parameter of D_alpha.
    curvature: if true, the solution has h, too; not for D_alpha.

    Raises:
        UsageError: if the optimiser does not fit the client's loss, or `loss` does not fit the targets.
        TaskError: if F has no minimum or the steps diverged (a precision is not positive, or a value is not
            finite).

    Examples:
        >>> import fedsim, torch
        >>> from fedsim.learning.shards import QuadraticShard
        >>> shard = QuadraticShard(torch.tensor([[2.0]]), torch.tensor([4.0]))  # w'w - 4 w
        >>> rng = fedsim.RandomStream(0, "task", round=1, client=0)
        >>> how = fedsim.IvonTraining(optimiser="exact")
        >>> prior = {"prior_mean": torch.zeros(1), "prior_precision": torch.tensor([2.0])}
        >>> q = fedsim.ivon(shard, torch.zeros(1), how=how, rng=rng, round=1, ess=1, **prior).solution
        >>> q.mean, q.precision
        (tensor([1.]), tensor([4.]))
    """
    check_optimiser(shard, how.optimiser, "ivon")
    assert alpha == 1.0 or not curvature
    if isinstance(shard, QuadraticShard):
        return _exact(shard, prior_mean, prior_precision, ess, dual, alpha)
    if loss is not None:
        shard.net.likelihood.classes_only("a robust loss")
    net, rng = shard.net, how.stream(rng)
    net.train()
    steps = how.epochs * batches(how, shard.size)
    state = _Ivon(
        net,
        start.to(net.weights),
        steps=steps,
        lr=how.lr_in(round),
        beta1=how.beta1,
        beta2=how.beta2,
        ess=ess,
        prior_mean=prior_mean,
        prior_precision=prior_precision,
        dual=dual,
        h=0.0 if h0 is None else h0,
        moments=moments if how.carry else None,
        alpha=alpha,
    )
    d, remedy = state.offset.clone() if curvature and state.may_move else None, _remedy(dual)
    del prior_mean, prior_precision, dual  # large (float64); the state has its own copies
    _check_precision(state.precision(), remedy)
    draws = net.draws(rng, "ivon")
    eps = net.hold("eps", torch.empty_like(net.weights))

    def advance(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses = []
        for _ in range(how.samples):
            state.sample(eps.normal_(generator=draws), out=net.weights)
            losses.append(net.loss_gradient(inputs, targets, 1.0, loss))
            state.accumulate(net.grads)
        state.step()
        return losses

    constants = ("ivon", how.beta1, how.beta2, how.samples, state.may_move, loss, alpha)
    train_loss = run_epochs(shard, advance, how, rng, constants=constants)
    fit = IvonFit(
        MeanPrecision(
            net.owned_copy(state.mean), state.precision(), state.curvature(d) if curvature else None
        ),
        train_loss,
        state.moments() if how.carry else None,
        {"moved": 1 - how.beta2**steps},
    )
    _check_finite(fit, remedy)
    return fit


class _Ivon:
    """The state of Algorithm 2. For every weight sample call `sample`, then `accumulate`; then call `step`.

    The methods work in place on copies with the dtype and device of `start`. Operations are in the order of
    ivon-opt and not fused, so that every rounding agrees. The network holds all tensors (Net.hold), so that
    steps can be recorded (fedsim.learning.recordings).

    The state stores the curvature h as two parts with h + d = stored + offset. At first, offset is d and
    stored is h, as in ivon-opt. Near h = -d, this sum would be mostly rounding error. Therefore, where h
    falls below -d/2, stored becomes h + d and offset becomes 0 for the rest of the task. This change is
    exact (Sterbenz's lemma). It is left out for problems that ivon-opt can express.
    """

    def __init__(
        self,
        net: Net,
        start: Tensor,
        *,
        steps: int,
        lr: float,
        beta1: float,
        beta2: float,
        ess: float,
        prior_mean: Tensor,
        prior_precision: Tensor,
        dual: Gaussian | None,
        h: float | Tensor,
        moments: IvonMoments | None,
        alpha: float = 1.0,
    ) -> None:
        """Set up the state. steps: number of steps of the task."""
        self.alpha = alpha
        self.net, self.beta1, self.beta2, hold = net, beta1, beta2, net.hold
        self.lr, self.ess = net.number("lr", lr), net.number("ess", ess)
        before = moments.steps if moments else 0
        self.after = before + steps
        self.debias = _Numbers(net, lambda t: 1.0 - beta1**t, before, steps)
        d, u, v = _exact_terms(prior_precision, ess, dual)
        self.mean = hold("mean", start.clone())
        self.prior_mean = hold("prior_mean", prior_mean.to(start))
        self.offset = hold("offset", d.to(start))
        self.shift = hold("shift", u.to(start, copy=True))
        """The term subtracted from the data's curvature: u, or u - d where `stored` is h + d."""
        self.slope = hold("slope", (d - u).to(start))
        self.cavity = hold("cavity", (v - u * prior_mean.to(d)).to(start))
        """The gradient of duals and prior is slope (m - m_p) + cavity = v - u m + d (m - m_p)."""
        self.may_move = bool((u != 0).any() or (d != d[0]).any())
        stored = h.to(start, copy=True) if isinstance(h, Tensor) else torch.full_like(start, h)
        self.stored = hold("stored", stored)
        self.total = hold("total precision", self.stored + self.offset)
        """h + d (P,), in nats per example and squared unit of weight."""
        # steps work in place, but a task must not change its arguments
        momentum = owned(moments.momentum).to(start) if moments else torch.zeros_like(start)
        self.momentum = hold("momentum", momentum)
        self.scratch = hold("scratch", torch.empty_like(start))
        self.gradient = hold("gradient", torch.empty_like(start))
        self.product = hold("product", torch.empty_like(start))
        self.noise = self.scratch
        self.count = 0

    def sample(self, eps: Tensor, out: Tensor) -> None:
        """Write m + sigma eps into `out` (P,); overwrite `eps` (P,) with sigma eps for `accumulate`."""
        torch.mul(self.total, self.ess, out=self.scratch).sqrt_()
        self.noise = eps.div_(self.scratch)
        torch.add(self.mean, self.noise, out=out)

    def accumulate(self, gradient: Tensor) -> None:
        """Include the gradient (P,) of the mean loss at the last sample in the averages over samples."""
        self.count += 1
        if self.count == 1:
            self.gradient.copy_(gradient)
            torch.mul(self.noise, gradient, out=self.product)
            return
        for mean, value in ((self.gradient, gradient), (self.product, self.noise.mul_(gradient))):
            mean.add_(torch.sub(value, mean, out=self.scratch).div_(self.count))

    def step(self) -> None:
        """Update q from the samples accumulated since the last step."""
        self.count = 0
        if self.alpha != 1.0:
            self._generalised_step()
            return
        total, scratch = self.total, self.scratch
        fresh = 1.0 - self.beta2
        # line 3, E[g (th - m)] / sigma^2 - u
        curvature = self.product.mul_(total).mul_(self.ess).sub_(self.shift)
        # line 4
        self.momentum.mul_(self.beta1).add_(self.gradient.mul_(1.0 - self.beta1))
        # line 5
        torch.sub(self.stored, curvature, out=scratch).square_().mul_(0.5 * fresh**2).div_(total)
        self.stored.mul_(self.beta2).add_(curvature.mul_(fresh)).add_(scratch)
        if self.may_move:
            self._move()
        torch.add(self.stored, self.offset, out=total)
        # line 6
        change = torch.div(self.momentum, self.debias.following(), out=self.gradient)
        change.add_(torch.sub(self.mean, self.prior_mean, out=scratch).mul_(self.slope)).add_(self.cavity)
        self.mean.sub_(change.div_(total).mul_(self.lr))

    def _generalised_step(self) -> None:
        """Move q towards the stationary point for D_alpha. Precisions are on the scale of the mean loss."""
        alpha, fresh, total = self.alpha, 1.0 - self.beta2, self.total
        w = 1 / (alpha + (1 - alpha) * (self.slope / total).clamp(max=1.0))
        pull = w * ((self.mean - self.prior_mean) * self.slope + self.cavity)
        aim = w * self.slope + alpha * self.ess * (self.product * total + (alpha - 1) * pull.square())
        step = aim - total
        total.add_(fresh * step + 0.5 * fresh**2 * step.square() / total)
        self.momentum.mul_(self.beta1).add_(self.gradient.mul_(1.0 - self.beta1))
        self.mean.sub_((self.momentum / self.debias.following() + pull) / total * self.lr)

    def _move(self) -> None:
        """Change `stored` from h to h + d where h < -d/2."""
        margin = torch.add(self.offset, self.stored, alpha=2.0, out=self.scratch)
        if self.net.asks_freely:
            if margin.amin() < 0:  # holds in nearly every step, but for few coordinates
                low = (margin < 0).nonzero().squeeze(1)
                self.stored[low] += self.offset[low]
                self.shift[low] = -self.slope[low]
                self.offset[low] = 0.0
            return
        below = margin < 0
        torch.where(below, self.stored + self.offset, self.stored, out=self.stored)
        torch.where(below, -self.slope, self.shift, out=self.shift)
        self.offset.masked_fill_(below, 0.0)

    def precision(self) -> Tensor:
        """Return 1/sigma^2, (P,)."""
        return self.total * self.ess

    def curvature(self, d: Tensor | None) -> Tensor:
        """Return h, (P,). d: the first offset, or None if no coordinate may have moved."""
        return self.net.owned_copy(self.stored) if d is None else self.stored - (d - self.offset)

    def moments(self) -> IvonMoments:
        """Return the moments after the task's steps."""
        return IvonMoments(self.net.owned_copy(self.momentum), self.after)


class _Numbers:
    """A sequence of numbers, one per step. On a GPU, or if steps are recorded, the device counts steps."""

    def __init__(self, net: Net, number: Callable[[int], float], before: int, steps: int) -> None:
        """Evaluate `number` for the steps before + 1, ..., before + steps."""
        self._values = map(number, count(before + 1))
        self._table: Tensor | None = None
        if not net.asks_freely:
            values = torch.tensor(list(islice(self._values, steps)), dtype=torch.float32)
            self._table = net.hold_rows("debias", values.to(net.device))
            self._place = net.hold("debias place", torch.zeros((1,), dtype=torch.int64, device=net.device))

    def following(self) -> float | Tensor:
        """Return the next number of the sequence, as a float or as a tensor (1,) on the device."""
        if self._table is None:
            return next(self._values)
        number = self._table.index_select(0, self._place)
        self._place.add_(1)
        return number


def _exact_terms(prior_precision: Tensor, ess: float, dual: Gaussian | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return d, u and v, each (P,) in float64, because d - u is used and u is often close to d."""
    d = prior_precision.double() / ess
    if dual is None:
        return d, torch.zeros_like(d), torch.zeros_like(d)
    return d, diagonal(dual.precision, d), dual.shift.to(d)


def _exact(
    shard: QuadraticShard,
    prior_mean: Tensor,
    prior_precision: Tensor,
    ess: float,
    dual: Gaussian | None,
    alpha: float,
) -> IvonFit:
    """Return the minimiser of F for lbar(th) = (1/2 th'A th - b'th) / N_k, in the dtype of the shard."""
    d, u, v = (term.to(shard.linear) for term in _exact_terms(prior_precision, ess, dual))
    hessian, linear = shard.hessian / shard.size, shard.linear / shard.size
    precision = ess * (hessian.diagonal() - u + d)
    remedy = _remedy(dual)
    _check_precision(precision, remedy)
    mean = _stationary(hessian, d - u, linear - v + d * prior_mean.to(d), remedy)
    if alpha != 1.0:
        curvature, slope, shift = hessian.diagonal(), d - u, d * prior_mean.to(d) - v
        for _ in range(GENERALISED):
            w = 1 / (alpha + (1 - alpha) * (ess * slope / precision).clamp(max=1.0))
            mean = _stationary(hessian, w * slope, linear + w * shift, remedy)
            pull = w * (slope * mean - shift)
            precision = ess * (alpha * curvature + w * slope + alpha * (alpha - 1) * ess * pull**2)
    fit = IvonFit(
        MeanPrecision(mean, precision, hessian.diagonal() - u if alpha == 1.0 else None),
        shard.loss(mean),
        None,
        {"moved": 1.0},
    )
    _check_finite(fit, remedy)
    return fit


def _stationary(hessian: Tensor, slope: Tensor, linear: Tensor, remedy: str) -> Tensor:
    """Return (hessian + diag(slope))^-1 linear after checking that it is a minimum."""
    matrix = hessian + torch.diag(slope)
    if int(torch.linalg.cholesky_ex(matrix).info):
        lowest = torch.linalg.eigvalsh(matrix)
        raise TaskError(
            f"the local problem has no minimum: its Hessian is not positive in {int((lowest <= 0).sum())} of "
            f"{len(lowest)} directions (smallest eigenvalue {float(lowest[0]):.3g}); {remedy}"
        )
    mean: Tensor = torch.linalg.solve(matrix, linear)
    return mean


def _remedy(dual: Gaussian | None) -> str:
    return "raise delta" if dual is None else "raise rho, or leave cap_dual on"


def _check_precision(precision: Tensor, remedy: str) -> None:
    bad = int((~((precision > 0) & precision.isfinite())).sum())
    if bad:
        raise TaskError(
            f"the local posterior's precision is not positive and finite in {bad} of {len(precision)} "
            f"coordinates (smallest {float(precision.min()):.3g}); {remedy}"
        )


def _check_finite(fit: IvonFit, remedy: str) -> None:
    bad = int((~fit.solution.mean.isfinite()).sum())
    if bad:
        raise TaskError(
            f"the local posterior's mean is not finite in {bad} of {len(fit.solution.mean)} coordinates "
            f"(smallest precision {float(fit.solution.precision.min()):.3g}); lower lr, or {remedy}"
        )
    _check_precision(fit.solution.precision, remedy)
    if not math.isfinite(fit.loss):
        raise TaskError(f"the local loss is {fit.loss}, at a finite mean; lower lr, or {remedy}")
