"""Base class of the ADMM and PVI algorithms, which are the members of the family of protocols._dual_rule.
It has the methods that all members share. A member adds its formulas, its exponential family and its solver.

    cavity       the prior factor of the client's problem        q_g^rho / t_k
    dual_step    the change of the client's site t_k             (q_k / q_g)^gamma
    server_step  the next q_g                                    prior * prod t_k * mean(q_k)^(rho K)

The formulas are expressions of Gaussians; *, / and ** act on natural parameters. With a fixed precision, only
the mean of server_step's result is used. Members do not inherit from each other.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, At, Context, Exchange, SetUp, Task, Unsent
from fedsim.errors import UsageError
from fedsim.hyperparameters import Covariance
from fedsim.learning.blocks import accumulating, elementwise
from fedsim.learning.gaussian import Gaussian, Penalty, Point, product, times
from fedsim.learning.ownership import keep
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.first_order import Moments
from fedsim.learning.solvers.ivon import IvonMoments
from fedsim.wire.schema import map_tensors
from protocols import _last
from protocols._dual_rule import CapDual, Consensus, Damping, Dual, MeanFactor, Rho, Silent, proper
from protocols._site_messages import (
    DIAGONAL,
    FULL,
    POINT,
    SCALED,
    ExponentialFamily,
    FixedPrecision,
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
]

SiteFit = LocalFit[Gaussian, Moments | IvonMoments]
"""Result of a local solver: q_k, mean training loss, the state that it keeps, scalars for the upload."""


@dataclass(frozen=True)
class Client:
    """State of a client. dual: its dual state. moments: the local solver's state that is kept for the next
    task. precision: S, if the family has a fixed precision."""

    dual: Dual
    moments: Moments | IvonMoments | None = None
    precision: Tensor | float = 1.0


@dataclass(frozen=True)
class SiteSums:
    """Sums of natural parameters over the uploads of an exchange so far, in float64.

    q: the decoded broadcast. shift, precision: those of Consensus.total with
    these uploads; on an edge server, the change by these uploads. product_shift, product_precision: those of
    prod q_k over the `count` uploads; product_shift is None if the server does not average the q_k.
    """

    q: Gaussian
    shift: Tensor
    precision: Tensor | float
    product_shift: Tensor | None = None
    product_precision: Tensor | float = 0.0
    count: float = 0

    @property
    def factors(self) -> tuple[Gaussian, Gaussian | None]:
        """The total, and the product of the q_k; None if the server does not average them."""
        total, averaged = Gaussian(self.shift, self.precision), self.product_shift
        return total, None if averaged is None else Gaussian(averaged, self.product_precision)

    def with_factors(self, total: Gaussian, product: Gaussian | None, count: float) -> SiteSums:
        """Return sums with these factors, of `count` uploads."""
        changed = replace(self, shift=total.shift, precision=total.precision)
        if product is None:
            return changed
        averaged: dict[str, Any] = {"product_shift": product.shift, "product_precision": product.precision}
        return replace(changed, **averaged, count=count)


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


class SiteAlgorithm(Algorithm[Consensus, Client, Any, Any]):
    """Base class that implements the methods of Algorithm from a member's formulas."""

    silent: Silent = "participants"
    delta: float

    averages: ClassVar[bool] = True
    """True if server_step uses the mean of the q_k."""
    duals: ClassVar[dict[str, str | None]] = {"dual.site": "total", "precision": None}
    folds_stale: ClassVar[bool] = True

    # ---- defined by a member

    @abstractmethod
    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian | tuple[Penalty, ...]:
        """Return the prior factor or factors of the client's problem, on the scale of the client's loss."""

    @abstractmethod
    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        """Return the factor by which t_k is multiplied."""

    @abstractmethod
    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        """Return the next q_g. sites: prod t_k over all clients. mean_q: mean of the participants' q_k."""

    @abstractmethod
    def solve(self, problem: LocalProblem) -> SiteFit:
        """Solve the client's problem: minimise its loss with the cavity as the prior."""

    # ---- defined by a member that differs

    @property
    def family(self) -> ExponentialFamily:
        """The exponential family of q, which determines the messages; by default S is learned."""
        return FULL if self.is_full else DIAGONAL

    def prior(self, like: Tensor) -> Gaussian:
        """Return the server's regulariser l_0 as a factor, for vectors like `like` (P,): N(0, I/delta)."""
        return self.family.isotropic(like, self.delta)

    def penalty(self, at: At) -> float:
        """Return rho, the weight of the client's divergence from q_g; 1 for a member without the option."""
        return at.value(getattr(self, "rho", 1.0))

    def exponents(self, at: At) -> tuple[float, float]:
        """Return rho_server and gamma of the formulas; members with the option `silent` override this."""
        return 0.0, 0.0

    def origin(self, start: Tensor) -> Gaussian:
        """Return q_g before the first server update; by default it is the prior."""
        return self.prior(start)

    # ---- methods of Algorithm

    def change(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        """Return the factor by which t_k is multiplied, on the client and on the server: the dual step,
        raised to the weight of the upload (At.weight)."""
        change = self.dual_step(q_k, q_g, at)
        return self._site(change if at.weight == 1.0 else change**at.weight)

    def _site(self, factor: Gaussian) -> Gaussian:
        """Return a factor as a site. With a fixed precision, sites are linear: log t_k = v_k . w."""
        return Gaussian(factor.shift, 0.0) if self.family.kind == "fixed" else factor

    def initial_dual(self, q: Gaussian, at: At) -> Dual:
        """Return a client's dual before its first task: its site is 1 and its q_k is `q`."""
        one = self._site(q / q)
        return Dual(one, q ** self.exponents(at)[0] * one if self.silent == "last" else None)

    def consensus(self, q: Gaussian, at: At) -> Consensus:
        """Return the server's initial state, with every client's initial dual."""
        dual = self.initial_dual(q, at)
        return Consensus(q, (dual.z or dual.site) ** at.K)

    def next_dual(self, dual: Dual, sent: Gaussian, q_g: Gaussian, at: At) -> Dual:
        """Return the client's dual after a dual step with the decoded factor `sent`."""
        if dual.z is None:
            return Dual(dual.site * self.change(sent, q_g, at))
        z, q_k = _last.implied(dual, sent, q_g, *self.exponents(at))
        return Dual(dual.site * self.change(q_k, q_g, at), z)

    def to_send(self, dual: Dual, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        """Return the factor to upload: q_k or, under silent = last, the increment of z_k."""
        if dual.z is None:
            return q_k
        return _last.increment(dual, q_k, self.change(q_k, q_g, at), self.exponents(at)[0])

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (self.family.exchange(self.silent, averages=self.averages),)

    def server_init(self, ctx: Context) -> Consensus:
        return self.consensus(self.origin(ctx.start), ctx.at())

    def client_init(self, ctx: Context, k: int) -> Client:
        q = self.origin(ctx.start)
        dual = self.initial_dual(q, ctx.at())
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
        sent = self.to_send(client.dual, fit.q, q, task.at)
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
        """Return the option `damping` if the member has it and its server does not average, else 1."""
        damping = None if self.averages else getattr(self, "damping", None)
        return 1.0 if damping is None else at.value(damping)

    def own_and_held(self, client: Client, down: Any, up: Any, task: Task) -> tuple[Any, Any]:
        """Return both messages or, if silent = last, the q_k that z_k implies with and without the upload."""
        if client.dual.z is None:
            return up, down
        rho_server, gamma = self.exponents(task.at)
        sent, q = (self.family.gaussian(m, client.precision) for m in (up, down))
        _, own = _last.implied(client.dual, sent, q, rho_server, gamma)
        return own, own / sent ** (1 / (rho_server + gamma))

    def client_unsent(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        """Take the dual step only on the client if silent = last; z_k changes with the next upload.

        Source: Er et al. 2025, Algorithm 1, https://arxiv.org/abs/2405.10618, where z_k is d_k.
        """
        if client.dual.z is None:
            return client
        keep(client.dual.z)  # client_commit may overwrite tensors that were given up, but z is used below
        moved = self.client_commit(client, down, up, task)
        return replace(moved, dual=replace(moved.dual, z=client.dual.z))

    @accumulating
    def committed(self, dual: Dual, down: Any, up: Any, S: Tensor | float, *, at: At) -> Dual:
        sent, q = self.family.gaussian(up, S), self.family.gaussian(down, S)
        return self.next_dual(dual, sent, q, at)

    def sums(self, server: Consensus, down: Any, ctx: Context) -> SiteSums:
        q = self.family.gaussian(down, server.q.precision)
        return self._sums(q, map_tensors(server.total, Tensor.clone))

    def no_sums(self, down: Any, ctx: Context) -> SiteSums:
        """Return empty sums for an edge server. A fixed precision is 1 there: the server need not know it."""
        return self._sums(self.family.gaussian(down), self.family.isotropic(ctx.start, 0.0))

    def _sums(self, q: Gaussian, total: Gaussian) -> SiteSums:
        if not self.averages or self.silent == "last":
            return SiteSums(q, total.shift, total.precision)
        return SiteSums(q, total.shift, total.precision, torch.zeros_like(q.shift), 0 * q.precision)

    def add(self, sums: SiteSums, a: Arrival, ctx: Context) -> SiteSums:
        q, centre = sums.q, None
        if ctx.mixed:
            q, centre = self.family.gaussian(a.down, sums.q.precision), sums.q
        factors = self.with_upload(sums.factors, a.up, q, centre, at=a.at)
        return sums.with_factors(*factors, sums.count + 1)

    @accumulating
    def with_upload(
        self,
        factors: tuple[Gaussian, Gaussian | None],
        up: Any,
        q: Gaussian,
        centre: Gaussian | None,
        *,
        at: At,
    ) -> tuple[Gaussian, Gaussian | None]:
        total, product = factors
        sent = self.family.gaussian(up, q.precision)
        averaged = sent if centre is None or product is None else _moved(sent, q, centre)
        factor = sent if self.silent == "last" else self.change(sent, q, at)
        return total * factor, product and product * averaged

    def from_sums(self, server: Consensus, down: Any, sums: SiteSums, ctx: Context) -> Consensus:
        (total, product), at = sums.factors, ctx.at()
        stepped = self._stepped(self.prior(ctx.start), total, MeanFactor(product, sums.count), at=at)
        q = proper(self.family.project(stepped, server.q.precision), "the global posterior q_g")
        length = float(torch.linalg.vector_norm(self._moved(q, sums.q)))
        return Consensus(q, total, self.penalty(at) * math.sqrt(at.K) * length, started=True)

    @elementwise
    def _stepped(self, prior: Gaussian, total: Gaussian, mean_q: MeanFactor, *, at: At) -> Gaussian:
        return self.server_step(prior, total, mean_q, at)

    @elementwise
    def _moved(self, q: Gaussian, before: Gaussian) -> Tensor:
        return times(q.precision, q.mean - before.mean)

    def merged(self, sums: SiteSums, others: SiteSums) -> SiteSums:
        """Add an edge server's sums, which take a fixed S as 1, except for sums of increments."""
        (total, product), (change, averaged) = sums.factors, others.factors
        if self.family.kind == "fixed" and self.silent == "participants":
            S = sums.q.precision
            change = Gaussian(times(S, change.shift), 0.0)
            averaged = averaged and Gaussian(times(S, averaged.shift), others.count * S)
        both = product and averaged and product * averaged
        return sums.with_factors(total * change, both, sums.count + others.count)

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
        """Return rho and the dual residual rho sqrt(K) |S_g (m_g' - m_g)|, with the new mean m_g'."""
        return {"rho": self.penalty(ctx.at()), "dual_residual": server.dual_residual}

    def dual_mismatch(self, server: Consensus, clients: Iterable[Client]) -> float | None:
        return server.total.mismatch(product((c.dual.z or c.dual.site) for c in clients))


def _moved(sent: Gaussian, q: Gaussian, centre: Gaussian) -> Gaussian:
    """Return the q_k of an upload that answers q, moved to the server's own q_g, the centre.

    The mean changes by m_g - m_q and the precision by the factor S_g / S_q. Averaged as it is, q_k would
    bring the coding error of q into the model (docs/decisions/027-few-bits.md).
    """
    precision = centre.precision * sent.precision / q.precision
    return Gaussian.at(centre.mean + sent.mean - q.mean, precision)
