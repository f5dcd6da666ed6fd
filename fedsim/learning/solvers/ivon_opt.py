"""IVON from the package ivon-opt, on flat vectors: FedIvon's local solver.

It minimises lambda E_q[lbar(th)] + KL(q || N(0, I/delta)) over q = N(m, diag sigma^2), with lbar the mean
loss and 1/sigma^2 = lambda h + delta. If h starts at the same value in all coordinates and the network makes
no random draws, fedsim.learning.solvers.ivon gives the same bits (docs/decisions/008-own-ivon.md).

The package draws from torch's global generator, which is seeded for the training and then restored. The
package is imported at its first use, because its import loads torch._dynamo, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.learning.gaussian import Gaussian
from fedsim.learning.shards import QuadraticShard, Shard, check_optimiser
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.epochs import rows_in_use
from fedsim.learning.solvers.ivon import IvonMoments, IvonTraining
from fedsim.seeds import RandomStream, seeded_torch

__all__ = ["IvonMoments", "IvonTraining", "MeanCurvature", "ivon_opt"]


@dataclass(frozen=True)
class MeanCurvature:
    """A diagonal Gaussian: its mean m (P,) and the curvature h (P,) of the mean loss in nats per example."""

    mean: Tensor
    curvature: Tensor


def ivon_opt(
    shard: Shard | QuadraticShard,
    start: Tensor,
    *,
    curvature: Tensor,
    how: IvonTraining,
    rng: RandomStream,
    round: int,
    delta: float,
    ess: float,
    moments: IvonMoments | None = None,
) -> LocalFit[MeanCurvature, IvonMoments]:
    """Train from m = `start` (P,) and h = `curvature` (P,). ess: lambda. delta: the prior's precision.

    h + delta/lambda stays positive; h itself may be negative. `moments` is used only if `how.carry`. The loss
    is the mean of the last epoch at the sampled weights. Dropout and the samples of the weights share torch's
    default generator of the device.

    Raises:
        UsageError: if the optimiser does not fit the client's loss.
    """
    check_optimiser(shard, how.optimiser, "ivon")
    if isinstance(shard, QuadraticShard):
        mean = shard.minimiser(1.0, (Gaussian(torch.zeros_like(shard.linear), delta / ess),))
        return LocalFit(MeanCurvature(mean, shard.hessian.diagonal() / shard.size), shard.loss(mean))
    from ivon import IVON  # loads torch._dynamo, see the module

    net, rng = shard.net, how.stream(rng)
    net.refuse("the package ivon-opt steps by itself")
    net.train()
    weights = nn.Parameter(start.to(net.weights, copy=True))
    optimiser = IVON(
        [weights],
        lr=how.lr_in(round),
        ess=ess,
        hess_init=how.h0,
        beta1=how.beta1,
        beta2=how.beta2,
        weight_decay=delta / ess,
        mc_samples=how.samples,
        rescale_lr=False,
    )
    (group,) = optimiser.param_groups
    group["hess"] = curvature.to(net.weights)
    if how.carry and moments is not None:
        group["momentum"], optimiser.current_step = moments.momentum.to(net.weights), moments.steps
    order, used = rng.torch("batches"), rows_in_use(how, shard.size)
    total = torch.zeros((), device=net.device)
    with seeded_torch(rng.key("ivon"), net.device):
        for epoch in range(how.epochs):
            for inputs, targets in shard.batches(how.batch_size, order, used):
                for _ in range(how.samples):
                    with optimiser.sampled_params(train=True):
                        net.load(weights.data)
                        loss = net.loss_gradient(inputs, targets, 1.0)
                        weights.grad = net.grads
                    if epoch == how.epochs - 1:
                        total.add_(loss, alpha=len(targets) / how.samples)
                optimiser.step()
    carried = IvonMoments(group["momentum"], optimiser.current_step) if how.carry else None
    return LocalFit(MeanCurvature(weights.detach(), group["hess"]), float(total) / used, carried)
