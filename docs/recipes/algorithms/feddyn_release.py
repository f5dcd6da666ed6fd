"""FedDyn with the released code's first round (docs/references/misprints.md), to see what it does.

    round 1, client:  the prox pulls to 0 instead of the start, and v_k <- alpha_k w_k
    round 1, server:  w_g <- mean of the w_k, and h stays 0

From round 2 on all is FedDyn's, but the server's h never gets what the clients' v_k took up in round 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.algorithm import Arrival, Context
from fedsim.learning.gaussian import Gaussian
from protocols._dual_rule import Consensus
from protocols.feddyn import FedDyn


@dataclass(frozen=True)
class FedDynRelease(FedDyn):
    name: ClassVar[str] = "feddyn_release"

    def origin(self, start: Tensor) -> Gaussian:
        return Gaussian.at(torch.zeros_like(start), 1.0)

    def server_update(
        self, server: Consensus, down: Any, arrivals: Iterable[Arrival], ctx: Context
    ) -> Consensus:
        after = super().server_update(server, down, arrivals, ctx)
        if server.started:
            return after
        mean = after.q.mean - after.total.shift / len(ctx.sizes)
        return replace(after, q=Gaussian.at(mean, 1.0), total=server.total)
