"""Memory points and function term of FedLap-Func: cross-entropy against soft labels on a few inputs.
Source: Swaroop et al. 2025, arXiv:2501.17325, Eq. 17; docs/references/equations.md#fedlap-func."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.errors import WireError
from fedsim.learning.params import Net

MemoryGradient = Annotated[
    Literal["epoch", "batch"],
    Meta(description="gradients of the memory points: of each once per epoch, or of all at every minibatch"),
]


@dataclass(frozen=True)
class Memory:
    """Some of a client's examples, without their labels.

    inputs: (M, I), as stored, flattened. weights: (M,), the number of the client's examples of the point's
    class divided by the number of memory points of that class; the weights add up to N_k.
    """

    inputs: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Held:
    """The memory points of several clients, sorted by owner.
    inputs: (M, I), as stored. weights: (M,). owners: (M,) int64, client ids."""

    inputs: Tensor
    weights: Tensor
    owners: Tensor

    @staticmethod
    def nothing() -> Held:
        """No memory points."""
        return Held(torch.zeros(0, 0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))

    @staticmethod
    def of(inputs: Tensor, weights: Tensor, owner: int) -> Held:
        """The memory of one client."""
        return Held(inputs, weights, torch.full((len(weights),), owner, device=weights.device))

    def rows(self, selected: Tensor) -> Held:
        """The rows that a mask selects."""
        return Held(self.inputs[selected], self.weights[selected], self.owners[selected])

    def order_with(self, other: Held) -> Tensor:
        """The permutation that sorts the rows of both memories by owner and keeps the order per owner."""
        return torch.cat([self.owners, other.owners]).argsort(stable=True)

    def joined(self, other: Held) -> Held:
        """The rows of both memories, sorted by owner."""
        if not len(self.weights):
            return other
        order = self.order_with(other)
        return Held(
            torch.cat([self.inputs, other.inputs])[order],
            torch.cat([self.weights, other.weights])[order],
            torch.cat([self.owners, other.owners])[order],
        )

    def labelled(
        self, labels: Tensor, owner: int, latest: Tensor, first: Memory | None
    ) -> tuple[Held, Tensor]:
        """The memory and its labels after an upload of the client `owner`.

        labels: (M, C), labels so far. latest: the upload's labels of the owner's rows, in order. first: the
        owner's memory, if uploaded. A wrong number of labels, or a second memory, raises a WireError.
        """
        known = int((self.owners == owner).sum())
        if len(latest) != (known if first is None else len(first.weights)) or (first is not None and known):
            raise WireError(f"client {owner} labels {len(latest)} points; the server has {known} of it")
        if first is None:
            labels = labels.clone()
            labels[self.owners == owner] = latest
            return self, labels
        added = Held.of(first.inputs, first.weights, owner)
        both = torch.cat([labels.reshape(-1, latest.shape[1]), latest])
        return self.joined(added), both[self.order_with(added)]


@dataclass(frozen=True)
class FunctionTerm:
    """sum_i weight_i * (- sum_c target_ic log softmax(f(x_i; w))_c).

    inputs: (M, *shape) float32. targets: (M, C), soft labels or a difference of two soft labels (the term is
    linear in the targets, so a point with two terms of opposite sign needs one pass). weights: (M,).
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor

    def divided(self, count: int, draws: torch.Generator) -> Iterator[FunctionTerm | None]:
        """Split the points at random into `count` terms, one per step, with weights times `count`.

        Every point is in one of the terms, so all terms together cost one pass over the points. The mean of
        the terms is this term, and each is an unbiased estimate of this term. None: a part without points.
        """
        order = torch.randperm(len(self.weights), generator=draws).to(self.weights.device)
        for i in range(count):
            rows = order[i::count]
            part = FunctionTerm(self.inputs[rows], self.targets[rows], count * self.weights[rows])
            yield part if len(rows) else None

    def add_gradient(self, net: Net) -> None:
        """Add the gradient at net.weights to net.grads, in the module's current mode."""
        logs = net.outputs(self.inputs).log_softmax(dim=1)
        loss = -(self.weights.to(logs)[:, None] * self.targets.to(logs) * logs).sum()
        loss.backward()  # type: ignore[no-untyped-call]


def choose(inputs: Tensor, targets: Tensor, points: int, draws: torch.Generator) -> Memory:
    """Choose `points` random examples of every class that is present, ordered by class.

    A class with fewer examples contributes all of them.
    """
    rows, weights = [], []
    for c in sorted(set(targets.tolist())):
        members = (targets == c).nonzero()[:, 0].cpu()
        selected = members[torch.randperm(len(members), generator=draws)[:points]]
        rows.append(selected)
        weights += [len(members) / len(selected)] * len(selected) if len(selected) else []
    picked = (torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long)).to(inputs.device)
    return Memory(inputs[picked].flatten(1), torch.tensor(weights, device=inputs.device))
