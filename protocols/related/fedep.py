"""FedEP and FedSEP - Guo et al. 2023 (arXiv:2302.04228): expectation propagation. A client matches the
moments of its tilted distribution, which minimises KL(tilted || q); PVI minimises KL(q || tilted).

    client:  cavity = q_g / t_k ;   tilted p_k = exp(-l_k) cavity                            (SUM loss)
             q_k <- argmin_q KL(p_k || q): mean and variances of p_k, coordinate by coordinate
             t_k <- t_k (q_k / q_g)^damping
    server:  q_g  = prior * prod_k t_k                                        over ALL clients
    init:    t_k = 1, q_g = N(0, I/delta)

With stateless = true this is FedSEP: clients keep nothing, and each uses the average site (q_g / prior)^(1/K)
instead of its own. The server's step is the same.

moments = langevin estimates the moments with a Markov chain, relative to a second chain with the same noise
and a Gaussian target. Weights that the data do not determine therefore keep the prior's precision.
moments = laplace uses the mode and the curvature at the mode; FedEP is then FedLap-Cov. The paper's other
choices are a scaled identity, which is FedLap up to scale, and natural-gradient VI, which is PVI. On diagonal
quadratics both options agree with PVI, and damping = 1 is exact after one round. On other quadratics langevin
gives a coordinate's marginal variance; PVI gives its variance conditional on the other coordinates.

Local training is Adam by default and searches for the mode. Each client keeps Adam's moments from round to
round (option `carry`), except in FedSEP.

Wire: 2P down, 2P up. The server derives the change of t_k from q_k and its own broadcast; the paper's clients
send the change itself.

moments = laplace takes the mode as the mean. On a skewed logistic regression with two weights, the mean is
wrong by .3 standard deviations and the variance by a third (tests/protocols/test_fedep.py).

Differs: damping = 1/K also if few of the clients take part: with one of ten, 1/|S| is no damping and diverges
(docs/participation.md#default-damping). The server multiplies the sites; the paper's server optimiser and its
clipping of the change are not implemented. The chain starts from the Laplace approximation and takes full
gradients; the paper uses iterate-averaged SGD, and a hyperparameter for the scale of the precision. The
moments use a control variate; the paper uses the moments of the samples
(docs/decisions/045-moments-by-a-control-variate.md).

References:
    Guo et al. 2023: https://arxiv.org/abs/2302.04228
    Li et al. 2015: https://arxiv.org/abs/1506.04132
    docs/references/equations.md#fedep
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta

from fedsim import Gaussian, LocalTraining, Task
from fedsim.hyperparameters import PriorPrecision
from fedsim.learning.solvers.tilted import Chain, check_chain, tilted_moments
from protocols._site_algorithm import (
    At,
    Client,
    Consensus,
    Damping,
    LocalProblem,
    MeanFactor,
    Moments,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class FedEP(SiteAlgorithm):
    delta: PriorPrecision = 1.0
    damping: Damping = "1/K"
    moments: Annotated[
        Literal["langevin", "laplace"],
        Meta(description="of the tilted distribution: by a chain, or mode and curvature"),
    ] = "langevin"
    stateless: Annotated[bool, Meta(description="FedSEP: the average site stands for the client's own")] = (
        False
    )
    chain: Chain = Chain()
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedep"
    paper: ClassVar[str] = "Guo et al. 2023, FedEP and FedSEP"
    url: ClassVar[str] = "https://arxiv.org/abs/2302.04228"
    default_model: ClassVar[str] = "logistic_bias"
    averages: ClassVar[bool] = False
    eval_samples: ClassVar[int] = 32

    def check(self, params: int) -> None:
        if self.moments == "langevin":
            check_chain(params, self.chain)

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        own = (q_g / self.prior(q_g.shift)) ** (1 / at.K) if self.stateless else site
        return q_g / own

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** at.value(self.damping)

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites

    def solve(self, problem: LocalProblem) -> SiteFit:
        cavity = self.cavity(problem.q, problem.site, problem.at)
        precision = torch.as_tensor(cavity.precision)
        moments = problem.client.moments
        assert moments is None or isinstance(moments, Moments)
        fit = tilted_moments(
            problem.shard,
            problem.start,
            cavity=Gaussian(cavity.shift, precision.clamp(min=self.delta)),  # rounding may leave less
            how=self.local,
            chain=self.chain if self.moments == "langevin" else None,
            rng=problem.task.rng,
            round=problem.task.round,
            moments=moments,
        )
        info = {"dual_slack": float(precision.min()), "capped": float((precision < 0).sum())}
        return SiteFit(fit.q, fit.loss, None if self.stateless else fit.carried, info)

    def client_commit(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        return client if self.stateless else super().client_commit(client, down, up, task)

    def dual_mismatch(self, server: Consensus, clients: Iterable[Client]) -> float | None:
        return None if self.stateless else super().dual_mismatch(server, clients)
