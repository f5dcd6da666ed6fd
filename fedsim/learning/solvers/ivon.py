"""IVON on flat vectors, with a prior per coordinate and duals: a client's variational local solver.

Algorithm 2 of Federated ADMM from Bayesian Duality (arXiv:2506.13150). It minimises over
q = N(m, diag sigma^2)

    F(q) = lambda E_q[ lbar(th) + v'th - 1/2 th'diag(u)th ] + KL( q || N(m_p, 1/s_p) )

with lbar the mean loss in nats per example. d = s_p / lambda is the prior's precision in the units of
the curvature h of lbar; q's precision is 1/sigma^2 = lambda (h + d). Without duals and with a prior
N(0, 1/s) it is the package ivon-opt, bit for bit (docs/decisions/008).

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
from fedsim.learning.shards import QuadraticShard, Shard, check_optimiser
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.epochs import batches, run_epochs
from fedsim.seeds import RandomStream


@dataclass(frozen=True)
class IvonTraining:
    """Settings of IVON. The released configurations differ in lr, h0 and beta2; the defaults here
    are for the main job's small network.

    lr: a step is lr times the natural gradient, which is in units of the weights: 1 is a Newton step.
    h0: curvature of the mean loss, in nats per squared unit of weight, assumed at the start of the
    very first local training; later ones start at h = 0, that is at the prior (released code).
    samples: Monte-Carlo samples of the weights per step.
    carry: momentum and step count live with the client over rounds (released code); false resets them.
    cosine_rounds: > 0: lr falls to 0 along half a cosine over so many rounds; 0: constant.
    noise: the tasks that share random numbers (samples, batch order, dropout). 'independent': none.
    'common': all clients in all rounds, as in the released code, which reseeds torch before every client's
    training. 'common_per_round': all clients of a round (docs/recipes/ivon_noise.toml measures the
    effect).
    optimiser 'exact' is for clients whose loss is quadratic: the minimiser in closed form.
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
        """The random stream of a task's training, by `noise`."""
        if self.noise == "independent":
            return task
        round = task.round if self.noise == "common_per_round" else 0
        return RandomStream(task.seed, f"{task.purpose} of all clients", round)

    def lr_in(self, round: int) -> float:
        """The learning rate of round 1, 2, ...: CosineAnnealingLR stepped once a round, then 0."""
        if not self.cosine_rounds:
            return self.lr
        done = min((round - 1) / self.cosine_rounds, 1.0)
        return self.lr * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class IvonMoments:
    """The running mean of gradients (P,) float32 and the number of steps behind it."""

    momentum: Tensor
    steps: int


@dataclass(frozen=True)
class MeanPrecision:
    """A diagonal Gaussian by its mean (P,) and precision (P,), both in the dtype of the weights."""

    mean: Tensor
    precision: Tensor


IvonFit = LocalFit[MeanPrecision, IvonMoments]
"""Its loss is the mean of the last epoch at the sampled weights ('exact': at the mean), without prior and
duals. info: `moved`, the fraction 1 - beta2^steps of the distance to a stationary point that h has
covered."""


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
    h0: float | None = None,
    moments: IvonMoments | None = None,
) -> IvonFit:
    """Minimise F from the mean `start` (P,) and the precision ess * (h0 + d); h0 None means h = 0.

    prior_mean m_p and prior_precision s_p (P,); ess is lambda; dual is the diagonal factor with shift v
    and precision u, in the units of F, so that -log dual is subtracted from the mean loss and u lowers
    the curvature. `moments` is used only if `how.carry`.

    Raises:
        UsageError: if the optimiser does not fit the client's loss.
        TaskError: if F has no minimum or the steps diverged: a precision that is not positive, a value that
            is not finite.
    """
    check_optimiser(shard, how.optimiser, "ivon")
    if isinstance(shard, QuadraticShard):
        return _exact(shard, prior_mean, prior_precision, ess, dual)
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
        h=h0 or 0.0,
        moments=moments if how.carry else None,
    )
    del prior_mean, prior_precision, dual  # in float64; the state has what it needs of them
    _check_precision(state.precision())
    draws = net.draws(rng, "ivon")
    eps = net.hold("eps", torch.empty_like(net.weights))

    def advance(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses = []
        for _ in range(how.samples):
            state.sample(eps.normal_(generator=draws), out=net.weights)
            losses.append(net.loss_gradient(inputs, targets, 1.0))
            state.accumulate(net.grads)
        state.step()
        return losses

    loss = run_epochs(
        shard, advance, how, rng, constants=("ivon", how.beta1, how.beta2, how.samples, state.may_move)
    )
    fit = IvonFit(
        MeanPrecision(net.owned_copy(state.mean), state.precision()),
        loss,
        state.moments() if how.carry else None,
        {"moved": 1 - how.beta2**steps},
    )
    _check_finite(fit)
    return fit


class _Ivon:
    """The state of Algorithm 2 and one step of it: any number of times (sample, accumulate), then step.

    Works in place on its own copies, in the dtype and on the device of `start`. The order of the
    operations is that of ivon-opt, none of them fused, because every rounding has to agree.

    All its tensors are held by the network, so that steps can be recorded.

    The curvature is kept as `stored` with h + d = stored + offset. At first offset is d, so that stored
    is h, as in ivon-opt. Where h falls below -d/2, stored becomes h + d and offset 0 for the rest of the
    task: near -d, computing h + d anew at every step would give only rounding error.
    The change itself is exact (Sterbenz). A problem that ivon-opt can pose keeps ivon-opt's form.
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
        h: float,
        moments: IvonMoments | None,
    ) -> None:
        """steps: those of the task."""
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
        """Subtracted from the data's curvature: u, or u - d where `stored` is h + d."""
        self.slope = hold("slope", (d - u).to(start))
        self.cavity = hold("cavity", (v - u * prior_mean.to(d)).to(start))
        """Duals and prior have the gradient slope (m - m_p) + cavity = v - u m + d (m - m_p)."""
        self.may_move = bool((u != 0).any() or (d != d[0]).any())
        self.stored = hold("stored", torch.full_like(start, h))
        self.total = hold("total precision", self.stored + self.offset)
        """h + d (P,), in nats per example and squared unit of weight."""
        # the step works in place and a task must not change its arguments
        momentum = owned(moments.momentum).to(start) if moments else torch.zeros_like(start)
        self.momentum = hold("momentum", momentum)
        self.scratch = hold("scratch", torch.empty_like(start))
        self.gradient = hold("gradient", torch.empty_like(start))
        self.product = hold("product", torch.empty_like(start))
        self.noise = self.scratch
        self.count = 0

    def sample(self, eps: Tensor, out: Tensor) -> None:
        """Write m + sigma eps into `out` (P,); `eps` (P,) is overwritten and kept until accumulate."""
        torch.mul(self.total, self.ess, out=self.scratch).sqrt_()
        self.noise = eps.div_(self.scratch)
        torch.add(self.mean, self.noise, out=out)

    def accumulate(self, gradient: Tensor) -> None:
        """Take in the gradient (P,) of the mean loss at the last sample."""
        self.count += 1
        if self.count == 1:
            self.gradient.copy_(gradient)
            torch.mul(self.noise, gradient, out=self.product)
            return
        for mean, value in ((self.gradient, gradient), (self.product, self.noise.mul_(gradient))):
            mean.add_(torch.sub(value, mean, out=self.scratch).div_(self.count))

    def step(self) -> None:
        """Move q by the samples taken in since the last step."""
        self.count = 0
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

    def _move(self) -> None:
        """Keep h + d itself where h < -d/2."""
        margin = torch.add(self.offset, self.stored, alpha=2.0, out=self.scratch)
        if self.net.asks_freely:
            if margin.amin() < 0:  # a few coordinates, in nearly every step
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
        """1/sigma^2 (P,)."""
        return self.total * self.ess

    def moments(self) -> IvonMoments:
        """The moments after the task's steps."""
        return IvonMoments(self.net.owned_copy(self.momentum), self.after)


class _Numbers:
    """A number for one step after the other; where steps are recorded, the device counts them."""

    def __init__(self, net: Net, number: Callable[[int], float], before: int, steps: int) -> None:
        """number: Of step before + 1, ..., before + steps."""
        self._values = map(number, count(before + 1))
        self._table: Tensor | None = None
        if not net.asks_freely:
            values = torch.tensor(list(islice(self._values, steps)), dtype=torch.float32)
            self._table = net.hold_rows("debias", values.to(net.device))
            self._place = net.hold("debias place", torch.zeros((1,), dtype=torch.int64, device=net.device))

    def following(self) -> float | Tensor:
        """The number of this step, as a factor of vectors."""
        if self._table is None:
            return next(self._values)
        number = self._table.index_select(0, self._place)
        self._place.add_(1)
        return number


def _exact_terms(prior_precision: Tensor, ess: float, dual: Gaussian | None) -> tuple[Tensor, Tensor, Tensor]:
    """d, u and v, each (P,) in float64: u is often close to d, and what counts is the difference."""
    d = prior_precision.double() / ess
    if dual is None:
        return d, torch.zeros_like(d), torch.zeros_like(d)
    return d, diagonal(dual.precision, d), dual.shift.to(d)


def _exact(
    shard: QuadraticShard, prior_mean: Tensor, prior_precision: Tensor, ess: float, dual: Gaussian | None
) -> IvonFit:
    """The minimum of F for lbar(th) = (1/2 th'A th - b'th) / N_k, in the dtype of the shard."""
    d, u, v = (term.to(shard.linear) for term in _exact_terms(prior_precision, ess, dual))
    hessian = shard.hessian / shard.size
    precision = ess * (hessian.diagonal() - u + d)
    _check_precision(precision)
    matrix = hessian + torch.diag(d - u)
    if int(torch.linalg.cholesky_ex(matrix).info):
        lowest = torch.linalg.eigvalsh(matrix)
        raise TaskError(
            f"the local problem has no minimum: its Hessian is not positive in {int((lowest <= 0).sum())} of "
            f"{len(lowest)} directions (smallest eigenvalue {float(lowest[0]):.3g}); {_REMEDY}"
        )
    mean = torch.linalg.solve(matrix, shard.linear / shard.size - v + d * prior_mean.to(d))
    fit = IvonFit(MeanPrecision(mean, precision), shard.loss(mean), None, {"moved": 1.0})
    _check_finite(fit)
    return fit


_REMEDY = "raise rho, or leave cap_dual on"


def _check_precision(precision: Tensor) -> None:
    bad = int((~((precision > 0) & precision.isfinite())).sum())
    if bad:
        raise TaskError(
            f"the local posterior's precision is not positive and finite in {bad} of {len(precision)} "
            f"coordinates (smallest {float(precision.min()):.3g}); {_REMEDY}"
        )


def _check_finite(fit: IvonFit) -> None:
    bad = int((~fit.solution.mean.isfinite()).sum())
    if bad:
        raise TaskError(
            f"the local posterior's mean is not finite in {bad} of {len(fit.solution.mean)} coordinates "
            f"(smallest precision {float(fit.solution.precision.min()):.3g}); lower lr, or {_REMEDY}"
        )
    _check_precision(fit.solution.precision)
    if not math.isfinite(fit.loss):
        raise TaskError(f"the local loss is {fit.loss}, at a finite mean; lower lr, or {_REMEDY}")
