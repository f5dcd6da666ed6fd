"""Running statistics of batch normalisation for any algorithm (--statistics average, local).

A layer's running mean and variance are not parameters: they have no gradient, and the algorithm's equations
do not contain them. They are kept apart from the parameter vector (P,), in s, shape (R,), float32.

    average:  server:  s           <- sum_k N_k s_k / sum_k N_k      over the clients that sent an upload
              client:  s_k         <- s of the broadcast, then changed by every forward pass of training
    local:    client:  s_k         is kept by the client from round to round, and is not sent

An exchange without training leaves s_k unchanged. `local` is local-statistic batch normalisation (SiloBN),
Andreux et al. 2020, https://arxiv.org/abs/2008.07424. FedBN (Li et al. 2021,
https://arxiv.org/abs/2102.07623) also keeps the affine parameters local; here they are sent.
In asynchronous runs, N_k is multiplied by the upload's weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fedsim.algorithm import AnyShard, Arrival, Context, Exchange, Task
from fedsim.errors import UsageError
from fedsim.learning.gaussian import Model, Normalised
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.wire.schema import Count, RunningStatistics, RunningSum
from fedsim.wrapper import AnyAlgorithm, Wrapper

FIELD = "running_statistics"
"""The name of the field in broadcasts, uploads and sums."""


@cache
def with_field(message: Any) -> Any:
    """Return a subclass of a message class, with the statistics as its last field."""
    added = (FIELD, RunningStatistics, field(kw_only=True))
    created = make_dataclass(message.__name__, [added], bases=(message,), frozen=True)
    created.__module__ = message.__module__
    return created


def extended(message: Any, statistics: Tensor) -> Any:
    """Return a copy of a message, with the statistics added."""
    values = {f.name: getattr(message, f.name) for f in fields(message)}
    kind: Any = type(message)
    return with_field(kind)(**values, **{FIELD: statistics})


@cache
def with_sums(sums: type) -> type:
    """Return the message class of an edge server, with sum_k N_k s_k and sum_k N_k."""
    own: list[tuple[str, Any]] = [*get_type_hints(sums, include_extras=True).items()]
    return make_dataclass("Sums", [*own, (FIELD, RunningSum), ("statistics_weight", Count)], frozen=True)


@cache
def with_state(inner: type) -> type:
    """Return the class of a server's or client's state, with statistics (R,) float32."""
    return make_dataclass("WithStatistics", [("inner", inner), ("statistics", Tensor)], frozen=True)


@dataclass
class Weighted:
    """The sums sum_k N_k s_k (in float64, in the order of the uploads) and sum_k N_k."""

    total: Tensor
    weight: float = 0.0

    def add(self, statistics: Tensor, weight: float) -> None:
        self.total = self.total + weight * statistics.double()
        self.weight += weight

    def mean(self, otherwise: Tensor) -> Tensor:
        """Return the weighted mean in float32; `otherwise` if nothing was added."""
        return (self.total / self.weight).float() if self.weight else otherwise


def _on(net: Net, statistics: Tensor) -> Net:
    net.statistics.copy_(statistics)
    return net


def _net_of(shard: AnyShard) -> Net:
    assert isinstance(shard, Shard)  # a quadratic loss has no network
    return shard.net


@dataclass(frozen=True)
class AveragedStatistics(Wrapper):
    """`inner` with statistics in broadcasts and uploads. start: the initial statistics, (R,)."""

    start: Tensor = field(compare=False, repr=False)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(map(self._extended, self.inner.exchanges))

    @property
    def setup(self) -> tuple[Exchange, ...]:
        return tuple(map(self._extended, self.inner.setup))

    @staticmethod
    def _extended(e: Exchange) -> Exchange:
        sums = None if e.sums is None else with_sums(e.sums)
        return Exchange(with_field(e.down), with_field(e.up), sums)

    @property
    def server_type(self) -> type:  # type: ignore[override]
        return with_state(self.inner.server_type)

    def server_init(self, ctx: Context) -> Any:
        return self.server_type(self.inner.server_init(ctx), self.start)

    def broadcast(self, server: Any, ctx: Context) -> Any:
        down = self.inner.broadcast(server.inner, self._seen(server, ctx))
        return extended(down, server.statistics)

    def broadcast_to(self, server: Any, k: int, ctx: Context) -> object | None:
        return self.inner.broadcast_to(server.inner, k, self._seen(server, ctx))

    def client_update(self, client: Any, down: Any, shard: AnyShard, task: Task) -> tuple[Any, Any]:
        net = _on(_net_of(shard), getattr(down, FIELD))
        draft, up = self.inner.client_update(client, down, shard, task)
        return draft, extended(up, net.statistics.clone())

    @staticmethod
    def _seen(server: Any, ctx: Context) -> Context:
        """Return the context with a network that has the server's statistics."""
        network = ctx.network
        return ctx if network is None else replace(ctx, network=lambda: _on(network(), server.statistics))

    # ---- the fold

    def server_update(self, server: Any, down: Any, arrivals: Iterable[Arrival], ctx: Context) -> Any:
        sums: dict[int, Weighted] = {}

        def seen() -> Iterator[Arrival]:
            for a in arrivals:
                edge = 0 if ctx.edge_of is None else ctx.edge_of(a.client)
                sums.setdefault(edge, self._zero()).add(
                    getattr(a.up, FIELD), ctx.sizes[a.client] * a.at.weight
                )
                yield a
                del a  # only one upload is in memory

        stream = seen()
        inner = self.inner.server_update(server.inner, down, stream, self._seen(server, ctx))
        for _ in stream:  # the algorithm may not have read every upload
            pass
        weighted = self._zero()
        for one in sums.values():
            weighted = Weighted(weighted.total + one.total, weighted.weight + one.weight)
        return self.server_type(inner, weighted.mean(server.statistics))

    def _zero(self) -> Weighted:
        return Weighted(torch.zeros_like(self.start, dtype=torch.float64))

    # ---- the end of a round

    def model(self, server: Any, ctx: Context) -> Model:
        inner: Any = self.inner.model(server.inner, ctx)
        return Normalised(inner, server.statistics)

    def report(self, server: Any, ctx: Context) -> Mapping[str, float]:
        return self.inner.report(server.inner, self._seen(server, ctx))

    def dual_mismatch(self, server: Any, clients: Iterable[Any]) -> float | None:
        return self.inner.dual_mismatch(server.inner, clients)


def _without_network(name: str) -> Any:
    """Return a method of LocalStatistics: the inner algorithm's, in a context whose network is refused."""

    def method(self: LocalStatistics, *arguments: Any) -> Any:
        *others, ctx = arguments
        return getattr(self.inner, name)(*others, self._without(ctx))

    return method


@dataclass(frozen=True)
class LocalStatistics(Wrapper):
    """`inner` with clients that keep their own statistics. start: the initial statistics, (R,)."""

    start: Tensor = field(compare=False, repr=False)

    @property
    def client_type(self) -> type:  # type: ignore[override]
        return with_state(self.inner.client_type)

    def client_init(self, ctx: Context, k: int) -> Any:
        return self.client_type(self.inner.client_init(ctx, k), self.start)

    def client_update(self, client: Any, down: Any, shard: AnyShard, task: Task) -> tuple[Any, Any]:
        net = _on(_net_of(shard), client.statistics)
        draft, up = self.inner.client_update(client.inner, down, shard, task)
        return self.client_type(draft, net.statistics.clone()), up

    def client_commit(self, client: Any, down: Any, up: Any, task: Task) -> Any:
        return replace(client, inner=self.inner.client_commit(client.inner, down, up, task))

    def client_unsent(self, client: Any, down: Any, up: Any, task: Task) -> Any:
        return replace(client, inner=self.inner.client_unsent(client.inner, down, up, task))

    def own_and_held(self, client: Any, down: Any, up: Any, task: Task) -> tuple[Any, Any]:
        return self.inner.own_and_held(client.inner, down, up, task)

    def dual_mismatch(self, server: Any, clients: Iterable[Any]) -> float | None:
        return self.inner.dual_mismatch(server, (client.inner for client in clients))

    # ---- the server, which has no statistics

    def _without(self, ctx: Context) -> Context:
        return ctx if ctx.network is None else replace(ctx, network=self._no_network)

    def _no_network(self) -> Net:
        raise UsageError(
            f"--statistics local: the server of {self.name} computes with the network, and has no running "
            "statistics; take average or frozen"
        )

    broadcast = _without_network("broadcast")
    broadcast_to = _without_network("broadcast_to")
    server_update = _without_network("server_update")
    model = _without_network("model")
    report = _without_network("report")


def with_statistics(algorithm: AnyAlgorithm, rule: str, start: Tensor) -> AnyAlgorithm:
    """Wrap the algorithm so that running statistics follow a rule (Experiment.statistics).

    start: the initial statistics, shape (R,), float32.
    """
    if rule == "average":
        return AveragedStatistics(algorithm, start)
    return LocalStatistics(algorithm, start) if rule == "local" else algorithm
