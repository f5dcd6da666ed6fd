"""FedAvgM, FedAdam, FedYogi, FedAdagrad - Reddi et al. 2021, Algorithm 2 (arXiv:2003.00295): FedAvg whose
server uses the averaged change as a gradient.

    client:  Delta_k = w_g - (E epochs of minibatch steps on lbar_k, started at w_g)
    server:  Delta = sum_k N_k Delta_k / sum_k N_k ;  w_g <- SERVERUPDATE(w_g, Delta)

The server of fedavgm is SGD with momentum; the other three are adaptive (fedsim.learning.solvers.server).
They are one algorithm with four defaults of `server`; --set rule=... turns one into another.

Wire: P down, P up.

Local training is SGD by default. With Adam, each client keeps Adam's moments from round to round (`carry`).

References:
    Reddi et al. 2021: https://arxiv.org/abs/2003.00295
    docs/references/equations.md#server-optimisers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.algorithm import AnyShard, Task
from fedsim.learning.solvers.first_order import LocalTraining, Moments
from protocols._averaging import Client, LocalFit, Pseudogradient, ServerOptimiser

LOCAL = LocalTraining(optimiser="sgd", lr=0.05)


class _FedOpt(Pseudogradient):
    """Base class with the client of all four algorithms."""

    local: LocalTraining
    paper: ClassVar[str] = "Reddi et al. 2021, Algorithm 2"
    url: ClassVar[str] = "https://arxiv.org/abs/2003.00295"
    default_model: ClassVar[str] = "mlp_small"

    def delta(self, client: Client, mean: Tensor, shard: AnyShard, task: Task) -> LocalFit[Tensor, Moments]:
        fit = task.minimise(shard, self.local, mean, moments=client.moments)
        return LocalFit(mean.double() - fit.weights.double(), fit.loss, fit.carried)


@dataclass(frozen=True)
class FedAvgM(_FedOpt):
    server: ServerOptimiser = ServerOptimiser("sgd", beta=0.9)
    local: LocalTraining = LOCAL
    name: ClassVar[str] = "fedavgm"

    @property
    def optimiser(self) -> ServerOptimiser:
        return self.server


@dataclass(frozen=True)
class FedAdam(_FedOpt):
    server: ServerOptimiser = ServerOptimiser("adam", server_lr=0.03, beta=0.9)
    local: LocalTraining = LOCAL
    name: ClassVar[str] = "fedadam"

    @property
    def optimiser(self) -> ServerOptimiser:
        return self.server


@dataclass(frozen=True)
class FedYogi(_FedOpt):
    server: ServerOptimiser = ServerOptimiser("yogi", server_lr=0.03, beta=0.9)
    local: LocalTraining = LOCAL
    name: ClassVar[str] = "fedyogi"

    @property
    def optimiser(self) -> ServerOptimiser:
        return self.server


@dataclass(frozen=True)
class FedAdagrad(_FedOpt):
    server: ServerOptimiser = ServerOptimiser("adagrad", server_lr=0.1)
    local: LocalTraining = LOCAL
    name: ClassVar[str] = "fedadagrad"

    @property
    def optimiser(self) -> ServerOptimiser:
        return self.server
