"""AMA - the alternating minimisation algorithm, Tseng 1991; Moellenhoff et al. v2, Eq. 39-41.
It is ADMM without the proximal term at the server, and thus the version of PVI for point estimates.

    client:  w_k <- argmin l_k(w) + v_k . w + (rho/2) ||w - w_g||^2      (SUM loss)
             v_k <- v_k + rho (w_k - w_g)
    server:  w_g <- (1/delta) sum_k v_k                                 over ALL clients
    init:    v_k = 0, w_g = 0

AMA converges for rho < 2 delta/K (Tseng, Eq. 3.4d). The bound is sharp if the l_k have a large curvature;
otherwise a larger rho converges, too. With rho = delta/K the first round gives the mean of the w_k. If only
|S| clients take part, only |S| duals change, and rho = delta/|S| corresponds to delta/K.

Wire: P down, P up. The server's sum contains the last dual of a client that does not take part. The server
takes no mean over the clients, so there is no option `silent`.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Differs: until the first server update, local training starts from the shared random start, while the proximal
centre is w_g = 0, as in the paper. rho = delta/|S| counts the clients that are asked in a round.

References:
    Tseng 1991, SIAM Journal on Control and Optimization 29(1), 119-138
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    docs/references/equations.md#ama
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from torch import Tensor

from fedsim.hyperparameters import PriorPrecision
from fedsim.learning.gaussian import Gaussian
from protocols._local_solvers import LocalTraining, to_the_mode
from protocols._site_algorithm import (
    POINT,
    At,
    ExponentialFamily,
    LocalProblem,
    MeanFactor,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class AMA(SiteAlgorithm):
    delta: PriorPrecision = 1.0
    rho: Annotated[
        Annotated[float, Meta(gt=0)] | Literal["delta/K", "delta/|S|"],
        Meta(description="penalty of all clients; too large a value diverges"),
    ] = "delta/|S|"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "ama"
    paper: ClassVar[str] = "Tseng 1991; Moellenhoff et al. v2, Eq. 39-41"
    url: ClassVar[str] = "https://arxiv.org/abs/2506.13150"
    default_model: ClassVar[str] = "mlp_small"
    averages: ClassVar[bool] = False

    @property
    def family(self) -> ExponentialFamily:
        return POINT

    def origin(self, start: Tensor) -> Gaussian:
        return POINT.isotropic(start, 1.0)

    def penalty(self, at: At) -> float:
        if isinstance(self.rho, str):
            return self.delta * at.value("1/K" if self.rho == "delta/K" else "1/|S|")
        return self.rho

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return q_g ** self.penalty(at) / site  # Eq. 39

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** self.penalty(at)  # Eq. 40

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites  # Eq. 41

    def solve(self, problem: LocalProblem) -> SiteFit:
        cavity = self.cavity(problem.q, problem.site, problem.at)
        return to_the_mode(problem, cavity, self.local, sum_loss=True)
