"""The methods that all members of the family of protocols._dual_rule share; a member adds its formulas, its
family and its local solver.

    cavity       what the client's loss is balanced against      q_g^rho / t_k
    dual_step    the change of the client's site t_k             (q_k / q_g)^gamma
    server_step  the next q_g                                    prior * prod t_k * mean(q_k)^(rho K)

The formulas are expressions of Gaussians: * / ** act on natural parameters. A family with a fixed precision
takes the mean of server_step's result. This is a template: members do not inherit from each other, and
whatever a member needs of the family is imported from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, At, Context, Exchange, Task, Unsent
from fedsim.errors import UsageError
from fedsim.learning.blocks import accumulating
from fedsim.learning.gaussian import Gaussian, Penalty, Point, product, times
from fedsim.learning.ownership import keep
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.first_order import Moments
from fedsim.learning.solvers.ivon import IvonMoments
from fedsim.wire.schema import map_tensors
from protocols._dual_rule import CapDual, Consensus, Damping, Dual, DualRule, MeanFactor, Rho, Silent
from protocols._site_messages import (
    DIAGONAL,
    FULL,
    POINT,
    SCALED,
    Covariance,
    ExponentialFamily,
    FixedPrecision,
    gaussian,
)

__all__ = [
    "DIAGONAL",
    "FULL",
    "POINT",
    "SCALED",
    "At",
    "CapDual",
    "Client",
    "Consensus",
    "Covariance",
    "Damping",
    "ExponentialFamily",
    "FixedPrecision",
    "LocalProblem",
    "MeanFactor",
    "Moments",
    "Rho",
    "SetUp",
    "Silent",
    "SiteAlgorithm",
    "SiteFit",
    "Ups",
    "gaussian",
]

SiteFit = LocalFit[Gaussian, Moments | IvonMoments]
"""q_k, the mean training loss, what the solver carries over, and scalars of the upload by name."""


@dataclass(frozen=True)
class Client:
    """dual: t_k, float64; moments: what the local optimiser carries over; precision: S of a family whose
    precision is fixed."""

    dual: Dual
    moments: Moments | IvonMoments | None = None
    precision: Tensor | float = 1.0


@dataclass(frozen=True)
class SiteSums:
    """The sums of a server over an exchange, as natural parameters in float64.

    q: the broadcast as decoded. shift, precision: those of Consensus.total; on an edge server, the change of
    them by its clients. product_shift, product_precision: those of prod q_k over the `count` uploads; None
    where they are not averaged.
    """

    q: Gaussian
    shift: Tensor
    precision: Tensor | float
    product_shift: Tensor | None = None
    product_precision: Tensor | float = 0.0
    count: float = 0

    @property
    def factors(self) -> tuple[Gaussian, Gaussian | None]:
        """The total, and the product."""
        total, averaged = Gaussian(self.shift, self.precision), self.product_shift
        return total, None if averaged is None else Gaussian(averaged, self.product_precision)


@dataclass(frozen=True)
class LocalProblem:
    """The problem that a client solves: its state, q_g as received, the start of training, and its data."""

    client: Client
    q: Gaussian
    start: Tensor
    shard: AnyShard
    task: Task

    @property
    def site(self) -> Gaussian:
        return self.client.dual.site

    @property
    def at(self) -> At:
        return self.task.at


Ups = Iterable[tuple[int, Any]]
"""The uploads of an exchange: client and Up, in ascending client id."""


class SetUp(ABC):
    """Exchanges with all clients before round 1, as an object of their own."""

    @property
    @abstractmethod
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of round 0."""

    @abstractmethod
    def broadcast(self, server: Consensus, ctx: Context) -> Any: ...

    @abstractmethod
    def client_update(self, client: Client, down: Any, shard: AnyShard, task: Task) -> tuple[Client, Any]: ...

    @abstractmethod
    def server_update(self, server: Consensus, down: Any, ups: Ups, ctx: Context) -> Consensus: ...


class SiteAlgorithm(Algorithm[Consensus, Client, Any, Any]):
    """The methods of Algorithm in terms of a member's formulas."""

    silent: Silent = "participants"

    averages: ClassVar[bool] = True
    """True if server_step uses the mean of the q_k."""
    duals: ClassVar[dict[str, str | None]] = {"dual.site": "total", "precision": None}

    # ---- what a member states

    @property
    @abstractmethod
    def family(self) -> ExponentialFamily:
        """The family of q, which fixes the messages."""

    @abstractmethod
    def prior(self, like: Tensor) -> Gaussian:
        """The server's regulariser l_0 as a factor, for vectors like `like` (P,)."""

    @abstractmethod
    def penalty(self, at: At) -> float:
        """rho, the weight of the client's divergence from q_g."""

    @abstractmethod
    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian | tuple[Penalty, ...]:
        """The factor or factors against which the client's loss is balanced, on the scale of the loss."""

    @abstractmethod
    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        """The change of t_k."""

    @abstractmethod
    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        """The next q_g from prod t_k over all clients and the mean of the participants' q_k."""

    @abstractmethod
    def solve(self, problem: LocalProblem) -> SiteFit:
        """Solve the client's problem: the cavity against its loss."""

    def exponents(self, at: At) -> tuple[float, float]:
        """rho_server and gamma of the formulas; only a member with the option `silent` has them."""
        return 0.0, 0.0

    def origin(self, start: Tensor) -> Gaussian:
        """q_g before the first fold: the prior, unless a member says otherwise."""
        return self.prior(start)

    @property
    def set_up(self) -> SetUp | None:
        """The exchanges before round 1, if there are any."""
        return None

    # ---- the contract

    def rule(self, at: At) -> DualRule:
        """The member's formulas in a round, for the rule that applies them; `at` any client."""
        return DualRule(
            at.K,
            self.penalty(at),
            lambda k, q_k, q_g: self._damped(self.dual_step(q_k, q_g, replace(at, k=k)), at),
            lambda prior, sites, mean_q: self.server_step(prior, sites, mean_q, at),
            self.silent,
            self.exponents(at),
            fixed=self.family.kind == "fixed",
        )

    def _damped(self, change: Gaussian, at: At) -> Gaussian:
        """A site's change as a stale upload makes it."""
        return change if at.weight == 1.0 else change**at.weight

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (self.family.exchange(self.silent, averages=self.averages),)

    @property
    def setup(self) -> tuple[Exchange, ...]:
        return () if self.set_up is None else self.set_up.exchanges

    def server_init(self, ctx: Context) -> Consensus:
        return self.rule(ctx.at()).server_init(self.origin(ctx.start))

    def client_init(self, ctx: Context, k: int) -> Client:
        q = self.origin(ctx.start)
        dual = self.rule(ctx.at()).client_init(q)
        return Client(dual, precision=q.precision if self.family.kind == "fixed" else 1.0)

    def broadcast(self, server: Consensus, ctx: Context) -> Any:
        if self.set_up is not None and not ctx.round:
            return self.set_up.broadcast(server, ctx)
        return self.family.broadcast(server.q)

    def client_update(self, client: Client, down: Any, shard: AnyShard, task: Task) -> tuple[Client, Any]:
        if self.set_up is not None and not task.round:
            return self.set_up.client_update(client, down, shard, task)
        q = self.family.gaussian(down, client.precision)
        start = down.mean if task.started else task.start
        fit = self.solve(LocalProblem(client, q, start, shard, task))
        sent = self.rule(task.at).upload(task.client, client.dual, fit.q, q)
        up = self.family.upload(client.dual, sent, fit.q, q, train_loss=fit.loss, **fit.info)
        return replace(client, moments=fit.carried), up

    def client_commit(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        if not task.round:
            return client
        dual = self.committed(client.dual, down, up, client.precision, at=task.at)
        return replace(client, dual=dual)

    def unsent(self) -> Unsent:
        if self.averages and self.silent != "last" and self._has_silent:
            raise UsageError(
                f"+event: the server of {self.name} averages the q_k of those who send, as if the others had "
                "the same; --set silent=last keeps every client's last one"
            )
        return "dual"

    def dual_damping(self, at: At) -> float:
        """The hyperparameter `damping` of a member whose server does not average; of others 1."""
        damping = None if self.averages else getattr(self, "damping", None)
        return 1.0 if damping is None else at.value(damping)

    def own_and_held(self, client: Client, down: Any, up: Any, task: Task) -> tuple[Any, Any]:
        """Under silent = last the server has z_k, which stands for a q_k as in DualRule.commit."""
        if client.dual.z is None:
            return up, down
        rho_server, gamma = self.exponents(task.at)
        sent, q = (self.family.gaussian(m, client.precision) for m in (up, down))
        own = (client.dual.z * sent / client.dual.site * q**gamma) ** (1 / (rho_server + gamma))
        return own, own / sent ** (1 / (rho_server + gamma))

    def client_unsent(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        """Under silent = last the dual step is the client's own, and only z_k waits for the next upload.

        Source: Er et al. 2025, Algorithm 1, https://arxiv.org/abs/2405.10618, where z_k is d_k.
        """
        if client.dual.z is None:
            return client
        keep(client.dual.z)  # a given-up z would be written over
        moved = self.client_commit(client, down, up, task)
        return replace(moved, dual=replace(moved.dual, z=client.dual.z))

    @accumulating
    def committed(self, dual: Dual, down: Any, up: Any, S: Tensor | float, *, at: At) -> Dual:
        sent, q = self.family.gaussian(up, S), self.family.gaussian(down, S)
        return self.rule(at).commit(at.k, dual, sent, q)

    def server_update(self, server: Consensus, down: Any, ups: Ups, ctx: Context) -> Consensus:
        if self.set_up is not None and not ctx.round:
            return self.set_up.server_update(server, down, ups, ctx)
        return super().server_update(server, down, ups, ctx)

    def sums(self, server: Consensus, down: Any, ctx: Context) -> SiteSums:
        q = self.family.gaussian(down, server.q.precision)
        return self._sums(q, map_tensors(server.total, Tensor.clone))

    def no_sums(self, down: Any, ctx: Context) -> SiteSums:
        """A fixed precision counts as 1 here: an edge server need not know it."""
        return self._sums(self.family.gaussian(down), self.family.isotropic(ctx.start, 0.0))

    def _sums(self, q: Gaussian, total: Gaussian) -> SiteSums:
        if not self.averages or self.silent == "last":
            return SiteSums(q, total.shift, total.precision)
        return SiteSums(q, total.shift, total.precision, torch.zeros_like(q.shift), 0 * q.precision)

    def add(self, sums: SiteSums, down: Any, k: int, up: Any, ctx: Context) -> SiteSums:
        total, product = self.with_upload(sums.factors, up, sums.q, at=ctx.at(k))
        if product is None:
            return SiteSums(sums.q, total.shift, total.precision)
        return SiteSums(
            sums.q, total.shift, total.precision, product.shift, product.precision, sums.count + 1
        )

    @accumulating
    def with_upload(
        self, factors: tuple[Gaussian, Gaussian | None], up: Any, q: Gaussian, *, at: At
    ) -> tuple[Gaussian, Gaussian | None]:
        total, product = factors
        sent = self.family.gaussian(up, q.precision)
        return self.rule(at).times_change(at.k, total, sent, q), product and product * sent

    def from_sums(self, server: Consensus, down: Any, sums: SiteSums, ctx: Context) -> Consensus:
        total, product = sums.factors
        rule, S = self.rule(ctx.at()), server.q.precision
        mean_q = MeanFactor(product, sums.count)
        return rule.stepped(sums.q, total, mean_q, self.prior(ctx.start), lambda q: self.family.project(q, S))

    def merged(self, sums: SiteSums, sent: Any) -> SiteSums:
        """A fixed S counted as 1 at the edge server, but in increments, which a client makes with it."""
        S = sums.q.precision
        fixed = self.family.kind == "fixed" and self.silent == "participants"
        both: SiteSums = super().merged(sums, map_tensors(sent, lambda t: times(S, t)) if fixed else sent)
        if not fixed or both.product_shift is None:
            return both
        return replace(both, product_precision=both.product_precision + sent.count * S)

    @property
    def _has_silent(self) -> bool:
        """True if `silent` is a hyperparameter."""
        return "silent" in {f.name for f in fields(self)}  # type: ignore[arg-type]

    def check_stale(self, damped: bool) -> None:
        if self.averages and self.silent != "last":
            last = "; --set silent=last keeps every client's last one" if self._has_silent else ""
            raise UsageError(
                f"--async: the server of {self.name} averages the q_k of a round, and those of an "
                f"asynchronous round are of different ages{last}"
            )
        if damped and self.silent == "last":
            raise UsageError(
                f"--async: under silent=last an upload of {self.name} is the change of z_k itself, which "
                "damp:P cannot damp on both sides; leave it out"
            )

    def model(self, server: Consensus, ctx: Context) -> Point | Gaussian:
        if not server.started:
            return Point(ctx.start)
        return Point(server.q.mean) if self.family.kind == "fixed" else server.q

    def report(self, server: Consensus, ctx: Context) -> Mapping[str, float]:
        """rho, and the dual residual rho sqrt(K) |S_g (m_g' - m_g)|."""
        return {"rho": self.penalty(ctx.at()), "dual_residual": server.dual_residual}

    def dual_mismatch(self, server: Consensus, clients: Iterable[Client]) -> float | None:
        return server.total.mismatch(product((c.dual.z or c.dual.site) for c in clients))
