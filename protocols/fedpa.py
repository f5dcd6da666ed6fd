"""FedPA - federated posterior averaging, Al-Shedivat et al. 2021, Algorithms 1, 3, 4 (arXiv:2010.05273).

    client:  x_1..x_l <- IASG samples of its posterior, started at w_g
             Delta_k  <- Sigma^-1 (w_g - xbar),  Sigma the shrunk sample covariance
    server:  Delta = sum_k N_k Delta_k / sum_k N_k ;  w_g <- SERVERUPDATE(w_g, Delta)

An IASG sample is a mean of SGD iterates. In the first `burn_in_rounds` rounds Delta_k is that of FedAvg, w_g
minus the last iterate, after the same number of steps. With one sample, Delta_k is w_g - x_1. Clients are
stateless. With steps_per_sample = epoch (the paper's FedPA-ME) a sample is the mean over one local epoch, and
a round has no burn-in steps.

Wire: P down, P up.

Local training is a chain of SGD with momentum, new in every task: nothing is carried over.

Differs: Alg. 1 prints (1/|S|) sum q_k Delta_k; here, as in the released code, the sum is divided by the sum
of weights. One product and an l x l solve give Delta_k; tests compare it with Appendix C's recurrence.

References:
    Al-Shedivat et al. 2021: https://arxiv.org/abs/2010.05273
    Mandt et al. 2017: https://arxiv.org/abs/1704.04289
    docs/references/equations.md#fedpa
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import AnyShard, Task
from fedsim.learning.solvers.iasg import Sampling, iasg, posterior_delta
from protocols._averaging import Client, LocalFit, Pseudogradient, ServerOptimiser


@dataclass(frozen=True)
class FedPA(Pseudogradient):
    shrinkage: Annotated[float, Meta(ge=0, description="weight of the samples' covariance; 0: none")] = 0.1
    burn_in_rounds: Annotated[int, Meta(ge=0, description="first rounds, which are FedAvg's")] = 5
    server: ServerOptimiser = ServerOptimiser("sgd", server_lr=0.5, beta=0.9)
    sampling: Sampling = Sampling()

    name: ClassVar[str] = "fedpa"
    paper: ClassVar[str] = "Al-Shedivat et al. 2021, Algorithms 1, 3, 4"
    url: ClassVar[str] = "https://arxiv.org/abs/2010.05273"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def optimiser(self) -> ServerOptimiser:
        return self.server

    def delta(self, client: Client, mean: Tensor, shard: AnyShard, task: Task) -> LocalFit[Tensor, Any]:
        chain = iasg(shard, mean, how=self.sampling, rng=task.rng, round=task.round)
        if task.round <= self.burn_in_rounds:
            return LocalFit(mean.double() - chain.solution.last.double(), chain.loss)
        return LocalFit(posterior_delta(mean, chain.solution.samples, self.shrinkage), chain.loss)
