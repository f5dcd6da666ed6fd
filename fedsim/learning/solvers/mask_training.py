"""Training of the probabilities with which fixed random weights are kept.

    theta = sigmoid(s);   m ~ Bernoulli(theta) at every step;   the network has the weights w m
    s <- s - eta dL/d(w m) w theta (1 - theta)          the gradient treats m as theta

Source: FedPM, Isik et al. 2023, Algorithm 1 and Sec. 3, https://arxiv.org/abs/2209.15328; the straight-
through gradient: Bengio et al. 2013, https://arxiv.org/abs/1308.3432.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.hyperparameters import BatchSize, Decay, DropLast, Epochs, LearningRate, Momentum
from fedsim.learning.params import Layout
from fedsim.learning.shards import Shard
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.epochs import run_epochs
from fedsim.learning.solvers.first_order import LocalTraining, decayed, stepper
from fedsim.seeds import RandomStream


@dataclass(frozen=True)
class MaskTraining:
    """Settings of the training of the scores s; the learning rate in round r is lr * decay^(r-1)."""

    epochs: Epochs = 5
    batch_size: BatchSize = 32
    lr: LearningRate = 0.1
    optimiser: Annotated[Literal["adam", "sgd"], Meta(description="of the scores")] = "adam"
    momentum: Momentum = 0.0
    decay: Decay = 1.0
    drop_last: DropLast = False


def signed_constants(start: Tensor, layout: Layout) -> Tensor:
    """Return the fixed weights w: the signs of `start` (P,) times sqrt(2 / fan_in) of the layer.

    A bias, or another parameter with one axis, has the factor of the preceding layer.
    """
    out, scale = torch.empty_like(start), 1.0
    for s in layout.slices:
        if len(s.shape) > 1:
            scale = (2.0 * s.shape[0] / s.size) ** 0.5
        part = start[s.offset : s.offset + s.size]
        out[s.offset : s.offset + s.size] = torch.where(part < 0, -scale, scale)
    return out


def train_mask(
    shard: Shard, fixed: Tensor, theta: Tensor, *, how: MaskTraining, rng: RandomStream, round: int
) -> LocalFit[Tensor, None]:
    """Train the probabilities `theta` (P,), in (0, 1), by minibatch steps. fixed: the weights w, (P,).

    The fit has the new probabilities, (P,), in (0, 1), and the mean loss of the last epoch.
    """
    net, lr = shard.net, decayed(how.lr, how.decay, round)
    scores, fixed = net.hold("scores", torch.logit(theta).to(net.weights)), net.hold("fixed", fixed)
    local = LocalTraining(lr=lr, optimiser=how.optimiser, momentum=how.momentum)
    step, draws = stepper(scores, local, net=net), net.draws(rng, "masks")
    net.train()

    def advance(inputs: Tensor, targets: Tensor) -> tuple[Tensor]:
        kept = torch.sigmoid(scores)
        mask = torch.rand(len(kept), generator=draws, device=draws.device).to(kept) < kept
        net.load(fixed * mask)
        loss = net.loss_gradient(inputs, targets, 1.0)
        step(net.grads * fixed * kept * (1 - kept))
        return (loss,)

    loss = run_epochs(shard, advance, how, rng, constants=("train_mask", local))
    return LocalFit(torch.sigmoid(scores), loss)
