"""FedADMM - Moellenhoff et al. v2, Eq. 5-7 (arXiv:2506.13150), and the form of Swaroop et al. 2025, Eq. 2.

    client:  w_k <- argmin l_k(w) + v_k . w + (rho/2) ||w - w_g||^2
             v_k <- v_k + rho (w_k - w_g)                         so that v_k = -grad l_k(w_k)
    server:  w_g <- (sum_k v_k + rho sum_k w_k) / (delta + rho K)
    init:    v_k = 0, w_g = the shared random start

With form = regularised, l_k is the SUM loss, the server has the regulariser (delta/2) ||w||^2, and the limit
is argmin sum_k l_k + (delta/2) ||w||^2. With form = mean, l_k is the MEAN loss and there is no regulariser.
The server then computes w_g = mean(w_k + v_k / rho), where rho is the paper's alpha, and the limit is
argmin sum_k lbar_k, in which all clients have equal weight for any N_k.

In natural parameters: q = N(w, I), site t_k = exp(v_k . w). This is protocols._dual_rule with gamma =
rho_server = rho. Bayesian-ADMM has the same three formulas with a learned precision.

Wire: P down, P up. In v2, Sec. 1 and Fig. 1, clients send w_k and the gradient (2P); here the server derives
the change of v_k from w_k. silent = participants: clients send w_k, and a client that does not take part
counts with the mean of this round's w_k. silent = last: clients send the increment of z_k = v_k + rho w_k,
and a client that does not take part counts with its last w_k, or with the start before its first upload.

Two options are rules of FedADMM-InSa (Song et al. 2024); b_k is rho_k for mean losses, rho_k / N_k for sums.
With inexact = c > 0, a client stops after the first epoch at which its problem's gradient, over all examples,
has at most .999 / (1 + sqrt(b_k / 2c)) of its norm at w_g; c replaces the strong-convexity constant. With
balance = mu > 0, each client adapts its rho_k by factors of tau (the option `factor`):

    rho_k <- rho_k tau if d > mu p, rho_k / tau if p > mu d;   d = |w_k - w_g|,  p = b_k |w_k - w_k before|
    server:  w_g <- sum_k (v_k + rho_k w_k) / (delta + sum_k rho_k),   rho_k of client k's last training

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Differs: w_g starts at the network's random start. From w_g = 0, the first server update would give twice the
mean of the w_k. prox_norm = unsquared uses (rho/2) ||w - w_g||, as in the released code. FedADMM-InSa has the
losses of form = mean; its weights N_k / N and its server's memory are not implemented.

References:
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    Boyd et al. 2011: https://doi.org/10.1561/2200000016
    Gong et al. 2022: https://arxiv.org/abs/2204.03529
    Wang et al. 2022: https://arxiv.org/abs/2203.15104
    Song et al. 2024: https://arxiv.org/abs/2402.13989
    docs/references/equations.md#fedadmm
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Context, Task
from fedsim.errors import UsageError
from fedsim.hyperparameters import ProxNorm
from fedsim.learning.gaussian import Distance, Gaussian, Penalty
from protocols._local_solvers import LocalTraining, to_the_mode
from protocols._site_algorithm import (
    POINT,
    SCALED,
    At,
    Client,
    Consensus,
    ExponentialFamily,
    LocalProblem,
    MeanFactor,
    Rho,
    Silent,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class FedADMM(SiteAlgorithm):
    form: Annotated[
        Literal["regularised", "mean"],
        Meta(description="summed losses and a regulariser, or mean losses: every client counts the same"),
    ] = "regularised"
    delta: Annotated[float, Meta(ge=0, description="regulariser (delta/2) |w|^2, of form regularised")] = 0.1
    rho: Rho = 10.0
    silent: Silent = "participants"
    prox_norm: ProxNorm = "squared"
    inexact: Annotated[float, Meta(ge=0, description="c of the criterion for less than all epochs")] = 0.0
    balance: Annotated[float, Meta(ge=0, description="mu of the rule for rho_k; 0: rho is constant")] = 0.0
    factor: Annotated[float, Meta(gt=1, description="tau, by which rho_k grows or falls")] = 2.0
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedadmm"
    paper: ClassVar[str] = "Moellenhoff et al. v2, Eq. 5-7; Swaroop et al. 2025, Eq. 2"
    url: ClassVar[str] = "https://arxiv.org/abs/2506.13150"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def family(self) -> ExponentialFamily:
        return SCALED if self.inexact or self.balance else POINT

    def check(self, params: int) -> None:
        if self.balance and self.silent != "last":
            raise UsageError("fedadmm: the server needs every client's rho_k: balance goes with silent=last")

    def prior(self, like: Tensor) -> Gaussian:
        return POINT.isotropic(like, self.delta if self.form == "regularised" else 0.0)

    def origin(self, start: Tensor) -> Gaussian:
        return Gaussian.at(start, 1.0)

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> tuple[Penalty, ...]:
        if self.prox_norm == "unsquared":
            return site**-1, Distance(q_g.mean, self.penalty(at) * float(q_g.precision))
        return (q_g ** self.penalty(at) / site,)  # Eq. 5

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** self.penalty(at)  # Eq. 6

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites * mean_q ** (self.penalty(at) * at.K)  # Eq. 7

    def exponents(self, at: At) -> tuple[float, float]:
        return self.penalty(at), self.penalty(at)

    def solve(self, problem: LocalProblem) -> SiteFit:
        cavity = self.cavity(problem.q, problem.site, problem.at)
        c, summed = self.inexact, self.form == "regularised"
        sigma = 0.999 / (1 + (self.per_example(problem.client, problem.at) / c / 2) ** 0.5) if c else 0.0
        fit = to_the_mode(problem, cavity, self.local, sum_loss=summed, tolerance=sigma)
        own = {} if self.family is POINT else {"epochs": float(self.local.epochs)}
        return replace(fit, info={**own, **fit.info})

    def per_example(self, client: Client, at: At) -> float:
        examples = at.sizes[at.k] if self.form == "regularised" else 1
        return self.penalty(at) * float(client.precision) / examples

    def client_commit(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        before = client.dual.mean if self.balance else None
        after = super().client_commit(client, down, up, task)
        if before is None:
            return after
        w_k, b_k = after.dual.mean, self.per_example(client, task.at)
        d, p = float((w_k - down.mean).norm()), b_k * float((w_k - before).norm())
        power = (d > self.balance * p) - (p > self.balance * d)
        return replace(after, precision=float(client.precision) * self.factor**power)

    def report(self, server: Consensus, ctx: Context) -> Mapping[str, float]:
        plain, mean = super().report(server, ctx), float(server.total.precision) / ctx.K
        return {**plain, "rho": mean} if self.balance else plain
