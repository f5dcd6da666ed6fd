"""What every member of the family of protocols._dual_rule does; an algorithm adds its constants, its family
and its local solver.

This is a template, not an algorithm: members do not inherit from each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Context, Exchange, Task
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.solvers.first_order import Moments
from fedsim.learning.solvers.ivon import IvonMoments
from protocols._dual_rule import Consensus, Dual, DualRule
from protocols._site_messages import ExponentialFamily


@dataclass(frozen=True)
class Client:
    """dual: t_k, float64; moments: what the local optimiser carries over; precision: S of a family whose
    precision is fixed."""

    dual: Dual
    moments: Moments | IvonMoments | None = None
    precision: Tensor | float = 1.0


@dataclass(frozen=True)
class LocalResult:
    """What a local solver found: q_k, the mean training loss, what it carries over, and further scalars of
    the upload by name."""

    q: Gaussian
    loss: float
    moments: Moments | IvonMoments | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)


class SiteAlgorithm(Algorithm[Consensus, Client, Any, Any]):
    """The methods of Algorithm in terms of rule, family, prior, origin and solve."""

    server_type: ClassVar[type] = Consensus
    client_type: ClassVar[type] = Client

    @abstractmethod
    def rule(self, sizes: tuple[int, ...], k: int = 0) -> DualRule:
        """The member's constants; only gamma may differ between clients."""

    @property
    @abstractmethod
    def family(self) -> ExponentialFamily: ...

    @abstractmethod
    def prior(self, like: Tensor) -> Gaussian:
        """The server's regulariser l_0 as a factor, for vectors like `like` (P,)."""

    def origin(self, start: Tensor) -> Gaussian:
        """q_g before the first fold: the prior, unless a member says otherwise."""
        return self.prior(start)

    @abstractmethod
    def solve(
        self, client: Client, q: Gaussian, start: Tensor, started: bool, shard: AnyShard, task: Task
    ) -> LocalResult:
        """The client's problem: pull = rule.pull(q, client.dual.site) against its loss, from `start`."""

    def dual_step(self, k: int, local: Gaussian, q: Gaussian, sizes: tuple[int, ...]) -> Gaussian:
        """The change of t_k; BregmanADMM has another."""
        return self.rule(sizes, k).dual_step(local, q)

    # ---- the contract

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (self.family.exchange(self.rule((1,)).silent),)

    def server_init(self, ctx: Context) -> Consensus:
        return self.rule(ctx.sizes).server_init(self.origin(ctx.start))

    def client_init(self, ctx: Context, k: int) -> Client:
        q = self.origin(ctx.start)
        dual = self.rule(ctx.sizes, k).client_init(q)
        return Client(dual, precision=q.precision if self.family.kind == "fixed" else 1.0)

    def broadcast(self, server: Consensus, ctx: Context) -> Any:
        return self.family.broadcast(server.q, server.started)

    def client_update(self, client: Client, down: Any, shard: AnyShard, task: Task) -> tuple[Client, Any]:
        q = self.family.posterior(down, client.precision)
        start = down.mean if down.started else task.start
        result = self.solve(client, q, start, down.started, shard, task)
        rule = self.rule(task.sizes, task.client)
        up = self.family.upload(rule, client.dual, result.q, q, train_loss=result.loss, **result.scalars)
        return replace(client, moments=result.moments), up

    def client_commit(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        q, sent = self.family.posterior(down, client.precision), self.family.factor(up, client.precision)
        rule = self.rule(task.sizes, task.client)
        step = partial(self.dual_step, task.client, sizes=task.sizes)
        return replace(client, dual=rule.commit(client.dual, sent, q, step))

    def server_update(
        self, server: Consensus, down: Any, ups: Iterable[tuple[int, Any]], ctx: Context
    ) -> Consensus:
        rule, S = self.rule(ctx.sizes), server.q.precision
        return rule.fold(
            server,
            self.family.posterior(down, S),
            self.prior(ctx.start),
            ((k, self.family.factor(up, S), up.dual_check) for k, up in ups),
            lambda merged: self.family.project(merged, rule, S),
            partial(self.dual_step, sizes=ctx.sizes),
        )

    def model(self, server: Consensus, ctx: Context) -> Point | Gaussian:
        if not server.started:
            return Point(ctx.start)
        return Point(server.q.mean) if self.family.kind == "fixed" else server.q

    def report(self, server: Consensus, ctx: Context) -> Mapping[str, float]:
        """rho; the dual residual rho sqrt(K) |S_g (m_g' - m_g)|; dual_mismatch: the largest difference
        between a client's dual and what the server holds of it (protocols._dual_rule.sketch, relative)."""
        return {
            "rho": self.rule(ctx.sizes).rho,
            "dual_residual": server.dual_residual,
            "dual_mismatch": server.mismatch,
        }
