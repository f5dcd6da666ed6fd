"""Least-squares clients for the FedPA studies, and a federation in memory that plays an algorithm on them.

    f_k(w) = 1/(2 n) |X_k w - y_k|^2 ,   A_k = X_k'X_k / n ,   b_k = X_k'y_k / n

Everything that learns is the package's own: a network of one linear layer with the Gaussian likelihood, its
shard, the algorithms' own methods. Messages are rounded to float32, as on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.algorithm import Algorithm, Context, Task
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.seeds import RandomStream


@dataclass(frozen=True)
class LeastSquares(Shard):
    """A client whose every batch is drawn anew, without replacement within the batch.

    This is how the paper's library draws (alshedivat/fedpa), and what the theory of iterate averaging takes
    for granted: the noise of two steps is independent. `iasg` draws so by itself (batches = "independent");
    the other solvers go through a shuffled epoch, whose gradients' noise sums to nearly nothing.
    """

    def batches(self, size: int, order: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.size // size):
            rows = torch.randperm(self.size, generator=order)[:size]
            yield self.inputs[rows], self.targets[rows]

    @property
    def quadratic(self) -> tuple[Tensor, Tensor]:
        """A_k (d, d) and b_k (d,), float64."""
        x, y = self.inputs.double(), self.targets.double()[:, 0]
        return x.T @ x / len(x), x.T @ y / len(x)


def line(dims: int) -> Net:
    """f(x) = w'x with the loss 1/2 (y - f(x))^2."""
    return Net(nn.Linear(dims, 1, bias=False), likelihood=likelihood("gaussian"))


def client(inputs: Tensor, targets: Tensor) -> LeastSquares:
    """A client from X (n, d) and y (n,)."""
    return LeastSquares(line(inputs.shape[1]), inputs.float(), targets.float()[:, None], 1.0)


def pooled(clients: Sequence[LeastSquares]) -> Tensor:
    """argmin of sum_k N_k f_k: (d,) float64."""
    parts = [(shard.size, *shard.quadratic) for shard in clients]
    matrix = torch.stack([n * a for n, a, _ in parts]).sum(0)
    return torch.linalg.solve(matrix, torch.stack([n * b for n, _, b in parts]).sum(0))


def play(
    algorithm: Algorithm[Any, Any, Any, Any],
    clients: Sequence[Shard],
    start: Tensor,
    *,
    rounds: int,
    seed: int,
) -> Tensor:
    """The server's model after 0, 1, .., `rounds` rounds with all clients: (rounds + 1, d) float64."""
    sizes = tuple(shard.size for shard in clients)
    layout = clients[0].net.layout
    context = Context(start.float(), layout, sizes, 0, 1, RandomStream(seed, "server"))
    server = algorithm.server_init(context)
    states = [algorithm.client_init(context, k) for k in range(len(clients))]
    path = [algorithm.model(server, context).mean]
    for round in range(1, rounds + 1):
        context = replace(context, round=round, rng=RandomStream(seed, "server", round))
        down, ups = rounded(algorithm.broadcast(server, context)), []
        for k, shard in enumerate(clients):
            task = Task(context.start, sizes, round, 1, k, RandomStream(seed, "client.1", round, k))
            draft, up = algorithm.client_update(states[k], down, shard, task)
            up = rounded(up)
            states[k] = algorithm.client_commit(draft, down, up, task)
            ups.append(context.arrival(k, down, up))
        server = algorithm.server_update(server, down, ups, context)
        path.append(algorithm.model(server, context).mean)
    return torch.stack([mean.double() for mean in path])


def rounded(message: Any) -> Any:
    """The message as its float32 frames carry it."""
    tensors = {name: value.float() for name, value in vars(message).items() if isinstance(value, Tensor)}
    return replace(message, **tensors)
