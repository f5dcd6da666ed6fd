"""The values that an algorithm's methods get: exchanges, contexts, tasks and arrivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedsim.errors import UsageError
from fedsim.hyperparameters import GgnEstimator
from fedsim.learning.gaussian import Penalty
from fedsim.learning.params import Layout, Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.first_order import LocalTraining, Moments, minimise
from fedsim.seeds import RandomStream
from fedsim.step_rules import At

AnyShard = Shard | QuadraticShard


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round: the class of the broadcast and the class of the upload.

    Either class may have an optional field group (fedsim.wire.schema); Algorithm.broadcast_to fills the
    broadcast's group for each client. `sums` is the class of the message that an edge server sends instead of
    its clients' uploads (Algorithm.add), with float64 fields; None if the server needs every upload itself.

    Examples:
        >>> from dataclasses import dataclass
        >>> import fedsim
        >>> @dataclass(frozen=True)
        ... class Message:
        ...     mean: fedsim.Mean
        >>> exchange = fedsim.Exchange(down=Message, up=Message)
        >>> exchange.down.__name__, exchange.sums
        ('Message', None)
    """

    down: type
    up: type
    sums: type | None = None


@dataclass(frozen=True)
class Context:
    """The values that server methods receive.

    start: the shared random initialisation, shape (P,), float32. sizes: N_k of all K clients. round: counted
    from 1, including empty rounds; 0 in the set-up. exchange: the exchange of the round, counted from 1.
    folds: the number of earlier rounds in which an upload was folded. asked: |S|, the number of clients that
    get the round's broadcast; 0 outside of rounds.

    Examples:
        >>> import fedsim, torch
        >>> from fedsim.learning.params import Layout
        >>> layout = Layout.named([("w", torch.zeros(2))])
        >>> rng = fedsim.RandomStream(seed=0, purpose="server", round=1)
        >>> ctx = fedsim.Context(torch.zeros(2), layout, sizes=(30, 10), round=1, exchange=1, rng=rng)
        >>> ctx.K, ctx.at(k=1).value("N_k/N")
        (2, 0.25)
    """

    start: Tensor
    layout: Layout
    sizes: tuple[int, ...]
    round: int
    exchange: int
    rng: RandomStream
    network: Callable[[], Net] | None = field(default=None, compare=False)
    read: Callable[[Tensor], Tensor] = field(default=lambda stored: stored, compare=False)
    """A function that converts stored inputs, shape (n, I), to inputs of the network."""
    folds: int = 0
    asked: int = 0
    public: Tensor = field(default_factory=lambda: torch.zeros(0, 0), compare=False)
    """The stored unlabelled inputs that server and clients share (Algorithm.public_inputs), shape (M, I)."""
    mixed: bool = False
    """True if the uploads to fold answer different broadcasts (--async, +quiet, +own)."""
    edge_of: Callable[[int], int] | None = field(default=None, compare=False)
    """A function that returns the edge server of a client; None without edge servers (--tree)."""

    @property
    def K(self) -> int:
        return len(self.sizes)

    def at(self, k: int = 0) -> At:
        """Return the values with which client k's step rules are evaluated in this round, as Task.at does."""
        return At(self.sizes, k, self.round, self.asked)

    def arrival(self, client: int, down: Any, up: Any, weight: float = 1.0) -> Arrival:
        """Return the arrival of an upload that answers the broadcast `down`; both are decoded."""
        return Arrival(client, down, up, replace(self.at(client), weight=weight))

    @property
    def net(self) -> Net:
        """A network for the server's computations, whose buffers no other thread uses."""
        if self.network is None:
            raise UsageError("this problem has no network that a server could use")
        return self.network()


@dataclass(frozen=True)
class Task:
    """The values that client methods receive: those of Context and the client's id. Round 0 is the set-up.

    Examples:
        >>> import fedsim, torch
        >>> rng = fedsim.RandomStream(seed=0, purpose="task", round=3, client=1)
        >>> task = fedsim.Task(
        ...     torch.zeros(2), sizes=(30, 10), round=3, exchange=1, client=1, rng=rng, folds=2
        ... )
        >>> task.K, task.started, task.at.value("N_k/N")
        (2, True, 0.25)
    """

    start: Tensor
    sizes: tuple[int, ...]
    round: int
    exchange: int
    client: int
    rng: RandomStream
    folds: int = 0
    asked: int = 0
    public: Tensor = field(default_factory=lambda: torch.zeros(0, 0), compare=False)
    weight: float = 1.0
    """The weight of the client's upload in an asynchronous run (Arrival.at)."""

    @property
    def K(self) -> int:
        return len(self.sizes)

    @property
    def at(self) -> At:
        """The values with which this client's step rules are evaluated in this round."""
        return At(self.sizes, self.client, self.round, self.asked, self.weight)

    @property
    def started(self) -> bool:
        """True if an earlier round folded an upload. Until then the broadcast is the initialisation."""
        return self.folds > 0

    def begin(self, mean: Tensor) -> Tensor:
        """Return the weights (P,) from which training starts: `mean`; before `started`, the random start."""
        return mean if self.started else self.start

    def curvature(
        self, shard: AnyShard, weights: Tensor, estimator: GgnEstimator, *, full: bool = False
    ) -> Tensor:
        """Return the GGN of the SUMMED loss at `weights` (P,): its diagonal (P,), or (P, P) if `full`.

        estimator: of the diagonal; the full matrix is exact."""
        return shard.full_curvature(weights) if full else shard.curvature(weights, estimator, self.rng)

    def minimise(
        self,
        shard: AnyShard,
        how: LocalTraining,
        start: Tensor,
        *,
        weight: float = 1.0,
        penalties: tuple[Penalty, ...] = (),
        moments: Moments | None = None,
        **options: Any,
    ) -> LocalFit[Tensor, Moments]:
        """Minimise weight * (mean loss) + sum of penalties from `start` (P,), with this task's random stream
        and round. options: the other arguments of fedsim.minimise."""
        return minimise(
            shard,
            start,
            how=how,
            rng=self.rng,
            round=self.round,
            weight=weight,
            penalties=penalties,
            moments=moments,
            **options,
        )


@dataclass(frozen=True)
class Arrival:
    """An upload that the server folds. Uploads are folded in ascending client id.

    down: the decoded broadcast that the upload answers (was computed from), of this round or an earlier one.
    up: the decoded upload; a substitute if the client's rule sent none (+event). at: the values for the
    client's step rules; at.weight is the upload's weight: (1 + staleness)^-P in an asynchronous run, above 1
    after rounds in which the client sent nothing, else 1.

    Examples:
        >>> import fedsim
        >>> arrival = fedsim.Arrival(1, down="broadcast", up="upload", at=fedsim.At(sizes=(30, 10), k=1))
        >>> arrival.at.value("N_k/N"), arrival.at.weight
        (0.25, 1.0)
    """

    client: int
    down: Any
    up: Any
    at: At
