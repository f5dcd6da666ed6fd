"""The states and messages of FedLap-Func, and which memory points a client or the server has.

A client's memory inputs cross the wire once: up with its first upload, and down to every other client with
the next round in which that client takes part (docs/references/equations.md#fedlap-func).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsim.learning.function_space import Held, Memory
from fedsim.learning.solvers.first_order import Moments
from fedsim.wire.schema import Inputs, Logits, Mean, Owners, Scalar, Weights


@dataclass(frozen=True)
class Server:
    """dual: sum_k v_k; mean: w_g, both (P,) float64. memory: all inputs received, in the order of their
    owners; logits (M, C): their last labels. arrived, synced (K,): the round in which a client's inputs
    came (0: not yet), and in which it last took part."""

    dual: Tensor
    mean: Tensor
    memory: Held
    logits: Tensor
    arrived: Tensor
    synced: Tensor

    @property
    def started(self) -> bool:
        return bool(self.synced.any())


@dataclass(frozen=True)
class Client:
    """dual: v_k (P,) float64; held: other clients' memory; logits (M_k, C): its own last labels, once the
    server has its inputs."""

    dual: Tensor
    held: Held
    logits: Tensor | None = None
    moments: Moments | None = None


@dataclass(frozen=True)
class NewMemory:
    """Memory that this client does not hold yet."""

    inputs: Inputs
    weights: Weights
    owners: Owners


@dataclass(frozen=True)
class Down:
    mean: Mean
    news: NewMemory | None = None


@dataclass(frozen=True)
class LabelledDown:
    """send_global_labels: the logits of w_g on all memory, in the order of owners."""

    mean: Mean
    logits: Logits
    news: NewMemory | None = None


AnyDown = Down | LabelledDown


@dataclass(frozen=True)
class OwnMemory:
    """A client's memory, sent once."""

    inputs: Inputs
    weights: Weights


@dataclass(frozen=True)
class Up:
    mean: Mean
    logits: Logits
    train_loss: Scalar
    own: OwnMemory | None = None


def news_for(server: Server, k: int) -> NewMemory | None:
    """The memory that client k has not received yet, or None."""
    fresh = server.arrived[server.memory.owners] >= max(1, int(server.synced[k]))
    rows = fresh & (server.memory.owners != k)
    if not bool(rows.any()):
        return None
    news = server.memory.rows(rows)
    return NewMemory(news.inputs, news.weights, news.owners)


def with_labels(memory: Held, labels: Tensor, k: int, up: Up) -> tuple[Held, Tensor]:
    """Memory and labels with those of client k's upload.

    Raises:
        WireError: if the upload labels other points than the client's memory has.
    """
    own = None if up.own is None else Memory(up.own.inputs, up.own.weights)
    return memory.labelled(labels, k, up.logits, own)
