"""First-order local solvers: pure functions from a client's data and penalties to new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.hyperparameters import BatchSize, CarryAdam, Clip, Decay, DropLast, Epochs, LearningRate, Momentum
from fedsim.learning.function_space import FunctionTerm, MemoryGradient
from fedsim.learning.gaussian import Gaussian, Penalty, constant_part
from fedsim.learning.ownership import owned
from fedsim.learning.params import Net
from fedsim.learning.shards import QuadraticShard, Shard, check_optimiser
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.epochs import batches, run_epochs
from fedsim.seeds import RandomStream


def decayed(lr: float, decay: float, round: int) -> float:
    """Return the learning rate of a round, lr * decay^(round-1)."""
    return lr * decay ** max(round - 1, 0)


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local training. Adam has default betas and eps, as in the papers' released code.

    optimiser: 'exact' computes the minimiser in closed form, for clients whose loss is quadratic.
    carry: if true, each client keeps Adam's moments and step count between rounds, as in the released code.
    The published numbers need this.
    clip: largest norm of the whole gradient, penalties included (as in the released code); 0: no limit.
    decay: the learning rate in round r is lr * decay^(r-1).

    Examples:
        >>> import fedsim
        >>> how = fedsim.LocalTraining(epochs=5, batch_size=32, lr=0.1, decay=0.5)
        >>> how.steps(100), how.in_round(3).lr
        (20, 0.025)
    """

    epochs: Epochs = 5
    batch_size: BatchSize = 32
    lr: LearningRate = 1e-3
    optimiser: Annotated[
        Literal["adam", "sgd", "exact"],
        Meta(description="of local training; exact: the minimiser in closed form, for quadratic losses"),
    ] = "adam"
    momentum: Momentum = 0.0
    carry: CarryAdam = True
    clip: Clip = 0.0
    decay: Decay = 1.0
    drop_last: DropLast = False

    def in_round(self, round: int) -> LocalTraining:
        """Return these settings with the learning rate of a round."""
        return replace(self, lr=decayed(self.lr, self.decay, round))

    def steps(self, examples: int) -> int:
        """Return the number of gradient steps of one local training on N_k = `examples`."""
        return self.epochs * batches(self, examples)


@dataclass(frozen=True)
class Smoothing:
    """The smoothed loss E[l(w + eps)], eps ~ N(0, I/precision), as a mean over pairs w + eps and w - eps.

    For a quadratic loss, the gradient of a pair is exact up to rounding: terms of odd order in eps cancel.
    """

    precision: float
    pairs: int

    def loss_gradient(
        self, net: Net, inputs: Tensor, targets: Tensor, weight: float | Tensor, draws: torch.Generator
    ) -> Tensor:
        """Write weight * grad E[mean loss] at net.weights into net.grads; return the mean loss (0-d).

        net.weights (P,) are restored at the end. Every call draws new noise, on the device of `draws`.
        """
        centre, total = net.snapshot(), torch.zeros_like(net.grads)
        loss = torch.zeros((), device=net.device)
        for _ in range(self.pairs):
            eps = torch.randn(len(centre), generator=draws, device=draws.device) / self.precision**0.5
            for point in (centre + eps, centre - eps):
                net.load(point)
                loss += net.loss_gradient(inputs, targets, weight)
                total += net.grads
        net.load(centre)
        net.grads.copy_(total.div_(2 * self.pairs))
        return loss / (2 * self.pairs)


Watch = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Moments:
    """Adam's first and second moment (P,) float32 and the number of steps taken.

    Examples:
        >>> import fedsim, torch
        >>> fedsim.Moments(first=torch.zeros(2), second=torch.zeros(2), steps=0).steps
        0
    """

    first: Tensor
    second: Tensor
    steps: int


def minimise(
    shard: Shard | QuadraticShard,
    start: Tensor,
    *,
    how: LocalTraining,
    rng: RandomStream,
    round: int,
    weight: float = 1.0,
    penalties: tuple[Penalty, ...] = (),
    moments: Moments | None = None,
    term: FunctionTerm | None = None,
    memory_gradient: MemoryGradient = "batch",
    watch: Watch | None = None,
    smoothing: Smoothing | None = None,
    tolerance: float = 0.0,
) -> LocalFit[Tensor, Moments]:
    """Minimise weight * (mean loss) + sum of penalties (+ a function term) from `start` (P,).

    The solution is the weights (P,). Its loss is the mean of the last epoch, without penalties. `round`
    determines the learning rate. `moments` is used only if `how.carry`. On a QuadraticShard, 'sgd' takes as
    many steps as there are batches, each with the exact gradient.

    watch: function called with every batch's inputs and targets before the step. net.grads is then the
    gradient of the batch's (weighted) mean loss without penalties. The function must not change net.weights
    or net.grads. smoothing: replaces the loss by its expectation under a Gaussian around the weights, which
    does not move the minimiser of a quadratic loss.

    weight: 1 is the scale of the mean loss, N_k the scale of the papers' summed loss l_k(w). Adam uses the
    gradient of the objective. SGD divides this gradient by `weight` before clipping, as in the released code,
    so a learning rate has the same effect on both scales.

    memory_gradient: at every minibatch, 'batch' adds the gradient of all points of `term`; 'epoch' adds the
    gradient of a random part, so every point is used once per epoch (FunctionTerm.divided).

    tolerance: training stops after an epoch whose final gradient norm is at most `tolerance` times the norm
    at `start`; 0: no check. The gradient is that of the objective without a function term, over all examples
    in evaluation mode, so a check costs a pass over the examples. info then has the number of `epochs`.

    Raises:
        UsageError: if `how.optimiser` is 'exact' and the client's loss is not quadratic, or 'adam' and it is.

    Examples:
        >>> import fedsim, torch
        >>> from fedsim.learning.shards import QuadraticShard
        >>> shard = QuadraticShard(torch.tensor([[2.0]]), torch.tensor([4.0]))  # w'w - 4 w
        >>> rng = fedsim.RandomStream(0, "task", round=1, client=0)
        >>> exact = fedsim.LocalTraining(optimiser="exact")
        >>> fedsim.minimise(shard, torch.zeros(1), how=exact, rng=rng, round=1).weights
        tensor([2.])
        >>> prior = fedsim.Gaussian(torch.zeros(1), 2.0)
        >>> fedsim.minimise(shard, torch.zeros(1), how=exact, rng=rng, round=1, penalties=(prior,)).weights
        tensor([1.])
    """
    if isinstance(shard, QuadraticShard) and how.optimiser == "sgd":
        return _quadratic_sgd(shard, start, how.in_round(round), weight, penalties, tolerance)
    check_optimiser(shard, how.optimiser, "adam or sgd")
    if isinstance(shard, QuadraticShard):
        minimum = shard.minimiser(weight, penalties)
        return LocalFit(minimum, shard.loss(minimum))
    net, how = shard.net, how.in_round(round)
    net.load(start)
    net.train()
    cavities = tuple(net.hold(f"penalty {i}", p.to(net.weights)) for i, p in enumerate(penalties))
    factor = weight if weight == 1.0 else net.number("weight", weight)
    carried = moments if how.carry else None
    step = stepper(net.weights, how, carried, net)
    draws = net.draws(rng, "smoothing") if smoothing else None
    criterion = _Criterion(shard, net.weights, weight, cavities, tolerance, how.epochs) if tolerance else None
    parts: Iterator[FunctionTerm | None] = repeat(term)
    if term is not None and memory_gradient == "epoch":
        count, points = batches(how, shard.size), rng.torch("memory")
        parts = chain.from_iterable(term.divided(count, points) for _ in range(how.epochs))

    def advance(inputs: Tensor, targets: Tensor) -> tuple[Tensor]:
        if smoothing is None or draws is None:
            loss = net.loss_gradient(inputs, targets, factor)
        else:
            loss = smoothing.loss_gradient(net, inputs, targets, factor, draws)
        if watch is not None:
            watch(inputs, targets)
            net.train()
        if (part := next(parts)) is not None:
            part.add_gradient(net)
        for cavity in cavities:
            cavity.add_gradient(net.weights, net.grads)
        if how.optimiser == "sgd" and weight != 1.0:
            net.grads.div_(factor)
        _clip(net.grads, how.clip)
        step(net.grads)
        return (loss,)

    loss = run_epochs(
        shard,
        advance,
        how,
        rng,
        constants=("minimise", how, weight == 1.0, smoothing, *map(constant_part, cavities)),
        refused="the algorithm looks at every step"
        if watch
        else "they have a function term"
        if term
        else "a criterion ends them"
        if criterion
        else "",
        enough=criterion,
    )
    if criterion is not None:
        how = replace(how, epochs=criterion.epochs)
    moments = step.moments(how.steps(shard.size)) if how.carry else None
    return LocalFit(net.snapshot(), loss, moments, criterion.info if criterion else {})


class _Criterion:
    """A stopping criterion that counts epochs and checks after each if the objective's gradient is small."""

    def __init__(
        self,
        shard: Shard | QuadraticShard,
        weights: Tensor,
        weight: float,
        penalties: tuple[Penalty, ...],
        tolerance: float,
        most: int,
    ) -> None:
        """Measure the gradient at the start. weights: (P,), updated in place by steps. most: epoch limit."""
        self.shard, self.weights, self.scale = shard, weights, weight / shard.size
        self.penalties, self.most, self.epochs = penalties, most, 0
        self.least = tolerance * self._norm()

    def __call__(self) -> bool:
        self.epochs += 1
        return self.epochs < self.most and self._norm() <= self.least

    @property
    def info(self) -> dict[str, float]:
        """Scalars for the info of the fit."""
        return {"epochs": float(self.epochs)}

    def _norm(self) -> float:
        gradient = self.scale * self.shard.gradient(self.weights)
        for penalty in self.penalties:
            penalty.add_gradient(self.weights, gradient)
        if isinstance(self.shard, Shard):
            self.shard.net.train()  # Shard.gradient sets evaluation mode
        return float(torch.linalg.vector_norm(gradient))


def _clip(grads: Tensor, limit: float) -> None:
    """Scale a gradient down to the norm `limit`, in place; 0: no limit."""
    if limit:
        norm = torch.linalg.vector_norm(grads)
        grads.mul_((limit / (norm + 1e-6)).clamp(max=1.0))


def _quadratic_sgd(
    shard: QuadraticShard,
    start: Tensor,
    how: LocalTraining,
    weight: float,
    penalties: tuple[Penalty, ...],
    tolerance: float,
) -> LocalFit[Tensor, Moments]:
    """Run SGD with the exact gradient in every step; `how` has this round's learning rate."""
    w = start.to(shard.linear).clone()
    step, factors = _sgd(w, how), tuple(p.to(w) for p in penalties)
    criterion = _Criterion(shard, w, weight, factors, tolerance, how.epochs) if tolerance else None
    for _ in range(how.epochs):
        for _ in range(how.steps(shard.size) // how.epochs):
            grads = weight / shard.size * shard.gradient(w)
            for factor in factors:
                factor.add_gradient(w, grads)
            grads.div_(weight)
            _clip(grads, how.clip)
            step(grads)
        if criterion is not None and criterion():
            break
    return LocalFit(w, shard.loss(w), info=criterion.info if criterion else {})


@dataclass(frozen=True)
class LocalSGD:
    """Plain SGD; the learning rate in round r is lr * decay^(r-1)."""

    epochs: Epochs = 5
    batch_size: BatchSize = 32
    lr: LearningRate = 0.1
    decay: Decay = 1.0
    drop_last: DropLast = False


def corrected_sgd(
    shard: Shard | QuadraticShard,
    start: Tensor,
    *,
    how: LocalSGD,
    rng: RandomStream,
    round: int,
    share: float,
    constant: Tensor,
    anchor: Tensor | None = None,
) -> LocalFit[Tensor, None]:
    """Take the steps y <- y - eta [ share (grad f(y; z) - grad f(anchor; z)) + constant ] from y = `start`.

    z runs over the batches. Without an anchor, grad f(anchor; z) is left out. The solution is y (P,); its
    loss is the mean of the last epoch. On a QuadraticShard an epoch is one step with exact gradients.
    """
    y, lr = start.clone(), decayed(how.lr, how.decay, round)
    if isinstance(shard, QuadraticShard):
        for _ in range(how.epochs):
            slope = shard.gradient(y) - (0.0 if anchor is None else shard.gradient(anchor))
            y = y - lr * (share * slope / shard.size + constant)
        return LocalFit(y, shard.loss(y))
    net = shard.net
    y, constant = net.hold("iterate", y), net.hold("constant", constant.to(y))
    anchor = None if anchor is None else net.hold("anchor", anchor)
    weight = net.number("share", share)

    def advance(inputs: Tensor, targets: Tensor) -> tuple[Tensor]:
        net.train()
        slope = constant
        for point, sign in ((anchor, -1.0), (y, 1.0)):
            if point is not None:
                net.load(point)
                loss = net.loss_gradient(inputs, targets, 1.0)
                slope = slope + (sign * weight) * net.grads
        y.sub_(lr * slope)
        return (loss,)

    loss = run_epochs(
        shard, advance, how, rng, constants=("corrected_sgd", lr, anchor is None), dtype=torch.float64
    )
    return LocalFit(net.owned_copy(y), loss)


def minimise_memory(
    net: Net, start: Tensor, term: FunctionTerm, cavity: Gaussian, *, steps: int, lr: float
) -> Tensor:
    """Minimise term - log cavity by `steps` full-batch Adam steps from `start` (P,), in evaluation mode."""
    net.load(start)
    net.eval()
    cavity = cavity.to(net.weights)
    step = _adam(net.weights, LocalTraining(lr=lr), None)
    for _ in range(steps):
        net.grads.zero_()
        term.add_gradient(net)
        cavity.add_gradient(net.weights, net.grads)
        step(net.grads)
    return net.snapshot()


def stepper(
    weights: Tensor, how: LocalTraining, carried: Moments | None = None, net: Net | None = None
) -> _adam | _sgd:
    """Return Adam or SGD as a function of a gradient that updates `weights` in place.
    If `net` is given, it holds the optimiser's state (Net.hold)."""
    return _adam(weights, how, carried, net) if how.optimiser == "adam" else _sgd(weights, how, net)


class _adam:
    """Adam, by one fused kernel call per step on the flat buffers (same arithmetic as torch.optim.Adam)."""

    def __init__(
        self, weights: Tensor, how: LocalTraining, carried: Moments | None, net: Net | None = None
    ) -> None:
        self.weights, self.lr, self.net = weights, how.lr, net
        if carried is None:
            first, second = torch.zeros_like(weights), torch.zeros_like(weights)
        else:  # the kernel works in place, but a task must not change its arguments
            first, second = owned(carried.first), owned(carried.second)
        self.before = carried.steps if carried else 0
        steps = torch.tensor(float(self.before), device=weights.device)
        if net is not None:
            first, second, steps = (
                net.hold(name, t) for name, t in (("first", first), ("second", second), ("steps", steps))
            )
        self.first, self.second, self.steps = first, second, steps

    def __call__(self, grads: Tensor) -> None:
        self.steps += 1
        torch._fused_adam_(
            [self.weights],
            [grads],
            [self.first],
            [self.second],
            [],
            [self.steps],
            lr=self.lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def moments(self, taken: int) -> Moments:
        """Return the moments after `taken` steps."""
        first, second = (self.net.owned_copy(m) if self.net else m for m in (self.first, self.second))
        return Moments(first, second, self.before + taken)


class _sgd:
    """SGD with optional heavy-ball momentum, which is reset at every task."""

    def __init__(self, weights: Tensor, how: LocalTraining, net: Net | None = None) -> None:
        self.weights, self.lr, self.momentum = weights, how.lr, how.momentum
        velocity = torch.zeros_like(weights) if how.momentum else None
        self.velocity = velocity if velocity is None or net is None else net.hold("velocity", velocity)

    def __call__(self, grads: Tensor) -> None:
        if self.velocity is not None:
            grads = self.velocity.mul_(self.momentum).add_(grads)
        self.weights.add_(grads, alpha=-self.lr)

    def moments(self, taken: int) -> None:
        return None
