"""FedPM, Isik et al. 2023 (arXiv:2209.15328): an algorithm, a message kind and a codec of your own.

    fedsim launch --algo fedpm.py:FedPM --codec up.keep=fedpm.py:coded --workers 2

The weights w are fixed at random; the algorithm learns the probability theta of keeping each of them.

    client:  theta_k <- E epochs of minibatch steps on the scores logit(theta), with a new mask per step
             m_k ~ Bernoulli(theta_k)                         is sent
    server:  theta <- mean of m_k over the participants
    init:    theta = 1/2;  w = +-sqrt(2 / fan_in), with the signs of the random start

Wire: P down, P up. A mask is a field of floats, 0 or 1, and has 32 bits a parameter without the codec. With
it, both ends know theta, so a mask costs its entropy given theta, less than a bit, and arrives unchanged.

Differs: the counts of the masks start anew in every round; the paper's Beta prior adds up the rounds in which
every client takes part once. Biases have masks, with the constant of their layer. The evaluated weights are
w theta; the paper evaluates one drawn mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import constriction
import numpy as np
import torch
from torch import Tensor

import fedsim
from fedsim import Context, FieldKind, Part, Spec, Task

Probability = Annotated[Tensor, FieldKind("probability", unit=True)]
Mask = Annotated[Tensor, FieldKind("mask", unit=True)]


@dataclass(frozen=True)
class Server:
    theta: Tensor  # (P,) float64
    started: bool = False


@dataclass(frozen=True)
class Down:
    keep: Probability


# A codec refers to the field of the same name in the broadcast, so both are called `keep`.
@dataclass(frozen=True)
class Up:
    keep: Mask
    train_loss: fedsim.Scalar


def fixed_weights(start: Tensor, layout: Any) -> Tensor:
    """Return w, (P,): the signs of `start` times sqrt(2 / fan_in); a bias has the factor of its layer."""
    fixed, scale = torch.empty_like(start), 1.0
    for s in layout.slices:
        if len(s.shape) > 1:
            scale = (2 * s.shape[0] / s.size) ** 0.5
        fixed[s.offset : s.offset + s.size] = scale
    return torch.where(start < 0, -fixed, fixed)


@dataclass(frozen=True)
class FedPM(fedsim.Algorithm[Server, None, Down, Up]):
    epochs: int = 5
    batch_size: int = 32
    lr: float = 0.1
    margin: float = 0.01  # theta is held in [margin, 1 - margin] when training begins

    name: ClassVar[str] = "fedpm"
    paper: ClassVar[str] = "Isik et al. 2023, Algorithm 1"
    url: ClassVar[str] = "https://arxiv.org/abs/2209.15328"
    default_model: ClassVar[str] = "mlp_small"

    def unsent(self) -> Any:
        raise fedsim.UsageError("+event: an upload is a random mask, which differs in every round")

    def server_init(self, ctx: Context) -> Server:
        return Server(torch.full_like(ctx.start, 0.5, dtype=torch.float64))

    def client_init(self, ctx: Context, k: int) -> None:
        return None

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.theta)

    def client_update(self, client: None, down: Down, shard: Any, task: Task) -> tuple[None, Up]:
        if not isinstance(shard, fedsim.Shard):
            raise fedsim.UsageError("fedpm trains masks of a network's weights, and here is no network")
        fixed = fixed_weights(task.start, shard.net.layout)
        scores = torch.logit(down.keep.clamp(self.margin, 1 - self.margin))
        adam = torch.optim.Adam([scores], self.lr)
        order, draws = task.rng.torch("batches"), task.rng.torch("masks")
        for _ in range(self.epochs):
            total = 0.0
            for batch in shard.epoch(self.batch_size, order):
                theta = torch.sigmoid(scores)
                gradient, loss = batch.loss_gradient(fixed * torch.bernoulli(theta, generator=draws))
                scores.grad = gradient * fixed * theta * (1 - theta)  # as if the mask were theta
                adam.step()
                total += loss * batch.size
        mask = torch.bernoulli(torch.sigmoid(scores), generator=draws)
        return None, Up(mask, total / shard.size)

    def server_update(self, server: Server, down: Down, arrivals: Iterable[Any], ctx: Context) -> Server:
        total, count = torch.zeros_like(server.theta), 0
        for a in arrivals:
            total, count = total + a.up.keep, count + 1
        return Server(total / count, started=True)

    def model(self, server: Server, ctx: Context) -> fedsim.Point:
        weights = fixed_weights(ctx.start, ctx.layout) * server.theta
        return fedsim.Point(weights if server.started else ctx.start)


BERNOULLI = constriction.stream.model.Bernoulli(perfect=False)


def chances(spec: Spec, theta: Tensor | None) -> np.ndarray:
    """Return theta, away from 0 and 1, so that every mask has a code; 1/2 without a broadcast."""
    known = np.full(spec.count, 0.5) if theta is None else theta.numpy().astype(np.float64)
    return known.clip(0.01, 0.99)


def pack(mask: Tensor, spec: Spec, theta: Tensor | None) -> tuple[Part, ...] | None:
    bits = mask.numpy()
    if not np.isin(bits, (0, 1)).all():
        return None  # this is no mask, and is sent dense
    coder = constriction.stream.queue.RangeEncoder()
    coder.encode(bits.astype(np.int32), BERNOULLI, chances(spec, theta))
    return (("values", memoryview(coder.get_compressed().astype("<u4").tobytes())),)


def unpack(parts: tuple[memoryview, ...], spec: Spec, theta: Tensor | None) -> Tensor:
    decoder = constriction.stream.queue.RangeDecoder(np.frombuffer(parts[0], "<u4").astype(np.uint32))
    bits = decoder.decode(BERNOULLI, chances(spec, theta))
    if not decoder.maybe_exhausted():
        raise fedsim.WireError("bytes behind the mask")
    return torch.from_numpy(bits).to(spec.dtype)


def bounds(spec: Spec) -> tuple[fedsim.Bound, ...]:
    return (fedsim.Bound("values", 0, spec.dense_bytes + 8),)


MASKS = frozenset({"mask"})
coded = fedsim.Codec("coded", pack, unpack, bounds, kinds=MASKS, why="it is for masks", may_refer=True)
