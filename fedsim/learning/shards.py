"""A client's local loss, as an algorithm uses it: gradients, batches, curvature, memory points.

A Shard has examples and a network. A QuadraticShard has a quadratic loss, whose minimiser is known in closed
form (`exact`). Both offer algorithms the same methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.errors import UsageError
from fedsim.learning.curvature.diagonal_ggn import best_chunk, diagonal_ggn
from fedsim.learning.curvature.fisher import squared_gradients
from fedsim.learning.curvature.full_ggn import full_ggn
from fedsim.learning.function_space import Memory, choose
from fedsim.learning.gaussian import Distance, Penalty, diagonal, is_full
from fedsim.learning.params import Net
from fedsim.seeds import RandomStream

SEQUENCES_AT_ONCE = 32
"""Sequences per backward pass of the diagonal GGN, few because each has a softmax at every position."""


def as_floats(rows: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
    """Convert stored inputs (n, ...) to a network's inputs: (n, *shape) float32, divided by `scale`."""
    floats = rows.to(torch.float32).reshape(len(rows), *shape)
    return floats if scale == 1.0 else floats / scale


@dataclass(frozen=True)
class Batch:
    """A batch of a client's examples, with the client's network."""

    net: Net
    inputs: Tensor
    targets: Tensor

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.targets)

    def loss_gradient(self, weights: Tensor) -> tuple[Tensor, float]:
        """Return the gradient of the mean loss in training mode, and the mean loss.
        The gradient is a buffer of the network, valid until the network is used again."""
        self.net.refuse("the algorithm asks for every gradient")
        self.net.load(weights)
        self.net.train()
        loss = self.net.loss_gradient(self.inputs, self.targets, 1.0)
        return self.net.grads, float(loss)


@dataclass(frozen=True)
class Shard:
    """One client's examples and the network they train.

    inputs: (N_k, *shape), as stored (uint8 images stay uint8 until they are batched). targets: (N_k,) int64
    classes, or the targets of the network's likelihood. scale: divisor of the inputs after conversion to
    float32 (1 for raw inputs).

    Examples:
        >>> import fedsim, torch
        >>> from fedsim.learning.params import Net
        >>> net = Net(torch.nn.Linear(2, 3, bias=False))
        >>> shard = fedsim.Shard(net, torch.eye(2), torch.tensor([0, 1]), scale=1.0)
        >>> shard.size
        2
        >>> shard.gradient(torch.zeros(6)).shape, shard.logits(torch.zeros(6), torch.eye(2)).shape
        (torch.Size([6]), torch.Size([2, 3]))
    """

    net: Net
    inputs: Tensor
    targets: Tensor
    scale: float

    exact: ClassVar[bool] = False
    """True if the loss has a minimiser in closed form."""

    @property
    def size(self) -> int:
        """N_k, the number of examples."""
        return len(self.targets)

    @property
    def like(self) -> Tensor:
        """A 0-d tensor with the dtype and device of the shard's computations."""
        return self.net.weights.new_empty(())

    def floats(self, rows: Tensor) -> Tensor:
        """Convert stored inputs, flattened or not, to the network's inputs: (n, *shape) float32."""
        return as_floats(rows, tuple(self.inputs.shape[1:]), self.scale)

    def memory(self, points: int, draws: torch.Generator) -> Memory:
        """Choose `points` random examples of each class that this client has."""
        self.net.likelihood.classes_only("a memory of examples per class")
        return choose(self.inputs, self.targets, points, draws)

    def logits(self, weights: Tensor, stored: Tensor) -> Tensor:
        """Return the network's outputs (n, C) at `weights` for stored inputs."""
        return self.net.logits(weights, self.floats(stored))

    @property
    def chunk(self) -> int:
        """The fastest number of examples to differentiate at once."""
        return best_chunk(self.net.module, self.floats(self.inputs[:1]))

    def rows(self, size: int, order: torch.Generator, used: int | None = None) -> Iterator[Tensor]:
        """Yield the row numbers, int64, of each batch of one epoch in random order.
        The last batch may be short, as in the released code. used: number of rows to use; None: all."""
        rows = torch.randperm(self.size, generator=order)[:used].to(self.targets.device)
        yield from torch.split(rows, size)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the network's inputs and the targets for these rows."""
        return self.floats(self.inputs[rows]), self.targets[rows]

    def batches(
        self, size: int, order: torch.Generator, used: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of each batch of one epoch in random order (see `rows`)."""
        return map(self.batch, self.rows(size, order, used))

    def epoch(self, size: int, order: torch.Generator) -> Iterator[Batch]:
        """Yield the batches of one epoch in random order, as Batch objects."""
        for inputs, targets in self.batches(size, order):
            yield Batch(self.net, inputs, targets)

    def noise(self, key: int) -> AbstractContextManager[None]:
        """Seed the network's random draws (dropout) with `key` in a block."""
        return self.net.noise(key)

    def mean_fisher(self, weights: Tensor, chunk: int = 64) -> Tensor:
        """Return the diagonal of the empirical Fisher, (1/N_k) sum_i (grad log p(y_i | x_i, w))^2, (P,)."""
        total = torch.zeros_like(weights)
        chunks = (torch.split(part, chunk) for part in (self.inputs, self.targets))
        for inputs, targets in zip(*chunks, strict=True):
            total += squared_gradients(self.net, weights, self.floats(inputs), targets)
        return total / self.size

    def curvature(self, weights: Tensor, estimator: str, rng: RandomStream) -> Tensor:
        """Return the diagonal of the GGN of the SUMMED loss at `weights`: (P,) float32, non-negative.

        For sequences, the summed loss is N_k times the mean loss over all positions.
        """
        sequences = self.net.likelihood.sequences
        if not sequences:
            self.net.likelihood.classes_only("the diagonal GGN")
        self.net.load(weights)
        self.net.eval()
        size = SEQUENCES_AT_ONCE if sequences else self.chunk
        counted = self.targets >= 0
        total = diagonal_ggn(
            self.net.module,
            (self.floats(chunk) for chunk in torch.split(self.inputs, size)),
            columns=estimator,
            generator=rng.torch("curvature"),
            counted=torch.split(counted, size) if sequences else None,
        )
        return total * (self.size / max(int(counted.sum()), 1)) if sequences else total

    def full_curvature(self, weights: Tensor) -> Tensor:
        """Return the GGN of the SUMMED loss at `weights`: (P, P) float32, symmetric."""
        self.net.likelihood.classes_only("the full GGN")
        self.net.load(weights)
        self.net.eval()
        chunks = torch.split(self.inputs, self.chunk)
        return full_ggn(self.net.module, (self.floats(chunk) for chunk in chunks))

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of the SUMMED loss over all examples, in evaluation mode: (P,) float32."""
        self.net.load(weights)
        self.net.eval()
        total = torch.zeros_like(self.net.grads)
        chunks = (torch.split(part, self.chunk) for part in (self.inputs, self.targets))
        for inputs, targets in zip(*chunks, strict=True):
            self.net.loss_gradient(self.floats(inputs), targets, float(len(targets)))
            total += self.net.grads
        return total


@dataclass(frozen=True)
class QuadraticShard:
    """A client with the loss l_k(w) = 1/2 w' A w - b' w, for ridge regression and checks of identities.

    hessian: A, (P, P). linear: b, (P,). size: N_k, as used in averages.
    """

    hessian: Tensor
    linear: Tensor
    size: int = 1

    exact: ClassVar[bool] = True

    @property
    def like(self) -> Tensor:
        """A 0-d tensor with the dtype and device of the shard's computations."""
        return self.linear[0]

    def minimiser(self, weight: float, penalties: tuple[Penalty, ...]) -> Tensor:
        """Return the minimiser of weight/N_k * l_k(w) - sum of log factors (the penalties).

        Raises:
            UsageError: If a penalty is not quadratic.
        """
        scale = weight / self.size
        matrix, vector = scale * self.hessian, scale * self.linear
        for penalty in penalties:
            if isinstance(penalty, Distance):
                raise UsageError("prox_norm 'unsquared' has no closed form; use 'squared'")
            precision = penalty.precision
            if not is_full(precision):
                precision = torch.diag(diagonal(precision, vector))
            matrix, vector = matrix + precision, vector + penalty.shift.to(vector)
        minimum: Tensor = torch.linalg.solve(matrix, vector)
        return minimum

    def loss(self, weights: Tensor) -> float:
        """Return l_k(w) / N_k."""
        w = weights.to(self.linear)
        return float(w @ (self.hessian @ w) / 2 - self.linear @ w) / self.size

    def curvature(self, weights: Tensor, estimator: str, rng: RandomStream) -> Tensor:
        """Return the diagonal of the Hessian, (P,)."""
        return self.hessian.diagonal().clone()

    def full_curvature(self, weights: Tensor) -> Tensor:
        """Return the Hessian, (P, P)."""
        return self.hessian.clone()

    def gradient(self, weights: Tensor) -> Tensor:
        """Return A w - b."""
        gradient: Tensor = self.hessian @ weights.to(self.linear) - self.linear
        return gradient

    def loss_gradient(self, weights: Tensor) -> tuple[Tensor, float]:
        """Return the gradient of the mean loss, and the mean loss."""
        return self.gradient(weights) / self.size, self.loss(weights)

    def epoch(self, size: int, order: torch.Generator) -> Iterator[QuadraticShard]:
        """Yield the whole loss as one batch, so that an epoch has one exact gradient."""
        yield self

    def noise(self, key: int) -> AbstractContextManager[None]:
        """Return a context without effect, because a quadratic loss makes no random draws."""
        return nullcontext()

    def mean_fisher(self, weights: Tensor, chunk: int = 64) -> Tensor:
        """Return the diagonal of A / N_k, the Fisher information of a linear-Gaussian model."""
        return self.hessian.diagonal() / self.size

    def memory(self, points: int, draws: torch.Generator) -> Memory:
        """Return an empty memory, because there are no examples."""
        return Memory(torch.zeros(0, 0), torch.zeros(0))

    def logits(self, weights: Tensor, stored: Tensor) -> Tensor:
        """Return an empty tensor, because there are no examples."""
        return torch.zeros(0, 0)

    def floats(self, rows: Tensor) -> Tensor:
        """Return the rows unchanged."""
        return rows


def endless_batches(
    shard: Shard | QuadraticShard, size: int, rng: RandomStream
) -> Iterator[Batch | QuadraticShard]:
    """Yield the batches of one epoch after another, each in random order, without end.

    Examples:
        >>> import fedsim, torch
        >>> from itertools import islice
        >>> from fedsim.learning.shards import QuadraticShard
        >>> shard = QuadraticShard(torch.tensor([[2.0]]), torch.tensor([4.0]))
        >>> rng = fedsim.RandomStream(0, "task", round=1, client=0)
        >>> len(list(islice(fedsim.endless_batches(shard, 32, rng), 3)))
        3
    """
    order = rng.torch("batches")
    while True:
        yield from shard.epoch(size, order)


def check_optimiser(shard: Shard | QuadraticShard, optimiser: str, instead: str) -> None:
    """Raise a UsageError unless the optimiser is 'exact' if and only if the loss is quadratic."""
    if shard.exact and optimiser != "exact":
        raise UsageError("clients with a quadratic loss are solved with --set optimiser=exact")
    if not shard.exact and optimiser == "exact":
        raise UsageError(f"optimiser 'exact' needs a quadratic loss; use {instead} for a network")
