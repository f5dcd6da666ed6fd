"""Memory points of FedLap-Func and its variants: messages, function terms, and records of the memory points
that the clients and the server have. A memory point is a training input of a client.

A client sends its memory inputs once, with its first upload. The server then sends them once to every other
client, in the next round in which that client takes part (docs/references/equations.md#fedlap-func).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import AnyShard, Context, Task
from fedsim.learning.function_space import FunctionTerm, Held, Memory
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.solvers.first_order import minimise_memory
from fedsim.seeds import RandomStream
from fedsim.wire.gaussian_messages import Posterior
from fedsim.wire.schema import Inputs, Logits, Mean, Owners, Scalar, Weights

Tau = Annotated[float, Meta(ge=0, description="weight of the memory points; 0: none")]
PointsPerClass = Annotated[int, Meta(ge=0, description="memory points of a client per class")]
ServerSteps = Annotated[int, Meta(ge=1, description="steps of Adam on the server, per round")]
ServerLr = Annotated[float, Meta(gt=0, description="learning rate of these steps")]


@dataclass(frozen=True)
class NewMemory:
    """Memory points that the receiving client does not have yet."""

    inputs: Inputs
    weights: Weights
    owners: Owners


@dataclass(frozen=True)
class OwnMemory:
    """Memory points of the sending client, sent once."""

    inputs: Inputs
    weights: Weights


@dataclass(frozen=True)
class Down:
    """Broadcast of FedLap-Func."""

    mean: Mean
    news: NewMemory | None = None


@dataclass(frozen=True)
class LabelledDown:
    """Broadcast with send_global_labels. logits: those of w_g on all memory points, sorted by owner."""

    mean: Mean
    logits: Logits
    news: NewMemory | None = None


AnyDown = Down | LabelledDown


@dataclass(frozen=True)
class Up:
    mean: Mean
    logits: Logits
    train_loss: Scalar
    own: OwnMemory | None = None


@dataclass(frozen=True)
class CovDown(Posterior):
    """Broadcast of FedLap-Cov with function terms."""

    news: NewMemory | None = None


@dataclass(frozen=True)
class CovUp(Posterior):
    """Upload of FedLap-Cov with function terms."""

    logits: Logits
    train_loss: Scalar
    own: OwnMemory | None = None


@dataclass(frozen=True)
class Registry:
    """The server's record of all memory.

    points: all received memory points, sorted by owner. logits (M, C): their latest labels. arrived (K,): the
    round in which a client's inputs arrived. synced (K,): the round of a client's last upload. 0: none yet.
    """

    points: Held
    logits: Tensor
    arrived: Tensor
    synced: Tensor

    @staticmethod
    def empty(clients: int) -> Registry:
        none = torch.zeros(clients, dtype=torch.int64)
        return Registry(Held.nothing(), torch.zeros(0, 0), none, none)

    @property
    def started(self) -> bool:
        """True if any client has uploaded."""
        return bool(self.synced.any())

    def news_for(self, k: int) -> NewMemory | None:
        """Return the memory points that client k has not received yet, or None if there are none."""
        fresh = self.arrived[self.points.owners] >= max(1, int(self.synced[k]))
        rows = fresh & (self.points.owners != k)
        if not bool(rows.any()):
            return None
        news = self.points.rows(rows)
        return NewMemory(news.inputs, news.weights, news.owners)

    def heard(self, k: int, up: Up | CovUp, round: int) -> Registry:
        """Return the registry after an upload, which must label exactly the client's own memory points."""
        arrived, synced = self.arrived.clone(), self.synced.clone()
        synced[k] = round
        arrived[k] = arrived[k] if up.own is None else round
        own = None if up.own is None else Memory(up.own.inputs, up.own.weights)
        points, logits = self.points.labelled(self.logits, k, up.logits, own)
        return Registry(points, logits, arrived, synced)

    def minimise(
        self, cavity: Gaussian, start: Tensor, tau: float, ctx: Context, steps: int, lr: float
    ) -> Tensor:
        """Return the minimiser of the function term and the cavity, (P,) float64; `start` without memory."""
        if not len(self.points.weights) or tau == 0:
            return start
        labels = self.logits.softmax(dim=1)
        term = FunctionTerm(ctx.read(self.points.inputs), labels, tau * self.points.weights)
        return minimise_memory(ctx.net, start.float(), term, cavity, steps=steps, lr=lr).double()


@dataclass(frozen=True)
class OthersMemory:
    """A client's record of memory. held: the points of other clients. logits (M_k, C): the client's last
    labels of its own points; None until the server has these points."""

    held: Held
    logits: Tensor | None = None

    def with_news(self, news: NewMemory | None) -> OthersMemory:
        if news is None:
            return self
        return replace(self, held=self.held.joined(Held(news.inputs, news.weights, news.owners)))


def own_memory(shard: AnyShard, task: Task, points: int) -> Memory:
    """Select `points` examples of every class that the client has, the same ones in every round."""
    return shard.memory(points, RandomStream(task.rng.seed, "memory", 0, task.client).torch("points"))


def function_term(
    known: OthersMemory, own: Memory, w_g: Tensor, sent: Tensor | None, tau: float, shard: AnyShard, k: int
) -> FunctionTerm | None:
    """Return client k's function term. Its targets are the soft labels of w_g on all memory points, minus
    the client's own last labels on its own points. None: there is no memory, or tau is 0.
    sent (M, C): the logits of w_g if the server has sent them; else the client computes them.
    """
    points = known.held
    if known.logits is not None:
        points = points.joined(Held.of(own.inputs, own.weights, k))
    if not len(points.weights) or tau == 0:
        return None
    labels = (shard.logits(w_g, points.inputs) if sent is None else sent).softmax(dim=1)
    if known.logits is not None:
        labels[points.owners == k] -= known.logits.softmax(dim=1)
    return FunctionTerm(shard.floats(points.inputs), labels, tau * points.weights)


def label(
    shard: AnyShard, weights: Tensor, known: OthersMemory, own: Memory
) -> tuple[Tensor, OwnMemory | None]:
    """Return the memory part of an upload: the logits of w_k on the client's own memory points, and these
    points if the server does not have them yet, else None."""
    sent = OwnMemory(own.inputs, own.weights) if known.logits is None else None
    return shard.logits(weights, own.inputs), sent
