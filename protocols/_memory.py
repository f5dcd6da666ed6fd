"""The states and messages of FedLap-Func, and which memory points a client or the server has.

A client's memory inputs cross the wire once: up with its first upload, and down to every other client with
the next round in which that client takes part (docs/references/equations.md#fedlap-func).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.errors import WireError
from fedsim.learning.function_space import Held
from fedsim.learning.solvers.first_order import Moments
from fedsim.wire.schema import Flag, Inputs, Logits, Mean, Owners, Scalar, Weights


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
    started: Flag
    news: NewMemory | None = None


@dataclass(frozen=True)
class LabelledDown:
    """send_global_labels: the logits of w_g on all memory, in the order of owners."""

    mean: Mean
    started: Flag
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
    return NewMemory(server.memory.inputs[rows], server.memory.weights[rows], server.memory.owners[rows])


def with_labels(memory: Held, labels: Tensor, k: int, up: Up) -> tuple[Held, Tensor]:
    """Memory and labels with those of client k's upload.

    Raises:
        WireError: if the upload labels other points than the client's memory has.
    """
    known = int((memory.owners == k).sum())
    if len(up.logits) != (len(up.own.weights) if up.own is not None else known) or (up.own and known):
        raise WireError(f"client {k} labels {len(up.logits)} points; the server has {known} of it")
    if up.own is None:
        labels = labels.clone()
        labels[memory.owners == k] = up.logits
        return memory, labels
    mine = Held.of(up.own.inputs, up.own.weights, k)
    order, memory = memory.order_with(mine), memory.joined(mine)
    return memory, torch.cat([labels.reshape(-1, up.logits.shape[1]), up.logits])[order]
