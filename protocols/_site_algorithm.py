"""Template of the ADMM and PVI algorithms, the members of the family of protocols._dual_rule.
It has the methods that all members share. A member adds its formulas, its exponential family and its solver.

    cavity       the prior factor of the client's problem        q_g^rho / t_k
    dual_step    the change of the client's site t_k             (q_k / q_g)^gamma
    server_step  the next q_g                                    prior * prod t_k * mean(q_k)^(rho K)

The formulas are expressions of Gaussians: *, / and ** act on natural parameters. A family with a fixed
precision uses only the mean of server_step's result. Members do not inherit from each other; they import
everything that they share from this module.
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
"""Result of a local solver: q_k, mean training loss, the solver's carried state, scalars of the upload."""


@dataclass(frozen=True)
class Client:
    """State of a client. dual: its site t_k, float64. moments: carried over by the local optimiser.
    precision: S, if the precision of the family is fixed."""

    dual: Dual
    moments: Moments | IvonMoments | None = None
    precision: Tensor | float = 1.0


@dataclass(frozen=True)
class SiteSums:
    """Sums that a server accumulates over the uploads of an exchange, as natural parameters in float64.

    q: the decoded broadcast. shift, precision: parameters of Consensus.total; on an edge server, the change
    that its clients make to them. product_shift, product_precision: parameters of prod q_k over the `count`
    uploads. product_shift is None if the server does not average the q_k.
    """

    q: Gaussian
    shift: Tensor
    precision: Tensor | float
    product_shift: Tensor | None = None
    product_precision: Tensor | float = 0.0
    count: float = 0

    @property
    def factors(self) -> tuple[Gaussian, Gaussian | None]:
        """The total, and the product of the q_k or None."""
        total, averaged = Gaussian(self.shift, self.precision), self.product_shift
        return total, None if averaged is None else Gaussian(averaged, self.product_precision)


@dataclass(frozen=True)
class LocalProblem:
    """The problem that a client solves: its state, the received q_g, the initial weights, and its data."""

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
"""The uploads of an exchange: pairs of client id and Up, in ascending client id."""


class SetUp(ABC):
    """The exchanges with all clients before round 1, which a separate object implements."""

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
    """Base class that implements the methods of Algorithm from a member's formulas."""

    silent: Silent = "participants"

    averages: ClassVar[bool] = True
    """True if server_step uses the mean of the q_k."""
    duals: ClassVar[dict[str, str | None]] = {"dual.site": "total", "precision": None}

    # ---- defined by a member

    @property
    @abstractmethod
    def family(self) -> ExponentialFamily:
        """The exponential family of q, which determines the messages."""

    @abstractmethod
    def prior(self, like: Tensor) -> Gaussian:
        """The server's regulariser l_0 as a factor, for vectors like `like` (P,)."""

    @abstractmethod
    def penalty(self, at: At) -> float:
        """rho, the weight of the client's divergence from q_g."""

    @abstractmethod
    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian | tuple[Penalty, ...]:
        """The prior factor or factors of the client's problem, on the scale of the client's loss."""

    @abstractmethod
    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        """The factor by which t_k changes."""

    @abstractmethod
    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        """The next q_g from prod t_k over all clients and the mean of the participants' q_k."""

    @abstractmethod
    def solve(self, problem: LocalProblem) -> SiteFit:
        """Solve the client's problem: minimise its loss with the cavity as the prior."""

    def exponents(self, at: At) -> tuple[float, float]:
        """rho_server and gamma of the formulas; only members with the option `silent` define them."""
        return 0.0, 0.0

    def origin(self, start: Tensor) -> Gaussian:
        """q_g before the first server update: the prior, unless a member overrides this method."""
        return self.prior(start)

    @property
    def set_up(self) -> SetUp | None:
        """The exchanges before round 1, or None."""
        return None

    # ---- methods of Algorithm

    def rule(self, at: At) -> DualRule:
        """The rule that applies the member's formulas in a round; `at` may be that of any client."""
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
        """The change of a site, damped by the weight of a stale upload."""
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
        """The hyperparameter `damping` if the member has it and its server does not average, else 1."""
        damping = None if self.averages else getattr(self, "damping", None)
        return 1.0 if damping is None else at.value(damping)

    def own_and_held(self, client: Client, down: Any, up: Any, task: Task) -> tuple[Any, Any]:
        """The two messages; under silent = last, the q_k that z_k implies with and without the upload."""
        if client.dual.z is None:
            return up, down
        rho_server, gamma = self.exponents(task.at)
        sent, q = (self.family.gaussian(m, client.precision) for m in (up, down))
        own = (client.dual.z * sent / client.dual.site * q**gamma) ** (1 / (rho_server + gamma))
        return own, own / sent ** (1 / (rho_server + gamma))

    def client_unsent(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        """Take the dual step at the client alone under silent = last; z_k changes with the next upload only.

        Source: Er et al. 2025, Algorithm 1, https://arxiv.org/abs/2405.10618, where z_k is d_k.
        """
        if client.dual.z is None:
            return client
        keep(client.dual.z)  # client_commit overwrites tensors that were given up, but z is still needed
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
        """Zero sums, in which a fixed precision counts as 1, because an edge server need not know it."""
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

    def sums_for(self, sums: SiteSums, down: Any) -> SiteSums:
        return replace(sums, q=self.family.gaussian(down, sums.q.precision))

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
        """Add the sums of an edge server, which takes a fixed S as 1; increments already contain S."""
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
