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

    inputs: (M, I), as stored, flattened. weights: (M,), for each point the number of the client's examples
    of its class divided by the number of memory points of this class. The weights add up to N_k.
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
        """Return an empty memory."""
        return Held(torch.zeros(0, 0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))

    @staticmethod
    def of(inputs: Tensor, weights: Tensor, owner: int) -> Held:
        """Return the memory points of the client `owner`."""
        return Held(inputs, weights, torch.full((len(weights),), owner, device=weights.device))

    def rows(self, selected: Tensor) -> Held:
        """Return the rows where the mask `selected` is True."""
        return Held(self.inputs[selected], self.weights[selected], self.owners[selected])

    def order_with(self, other: Held) -> Tensor:
        """Return the stable permutation that sorts the rows of both memories, concatenated, by owner."""
        return torch.cat([self.owners, other.owners]).argsort(stable=True)

    def joined(self, other: Held) -> Held:
        """Return the rows of both memories, sorted by owner."""
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
        """Return the memory and its labels after an upload of the client `owner`.

        labels: (M, C), the labels so far. latest: the uploaded labels of the owner's rows, in order. first:
        the owner's memory, which only its first upload contains; else None. A wrong number of labels or a
        second memory raises a WireError.
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
    """The function term sum_i weight_i * (- sum_c target_ic log softmax(f(x_i; w))_c).

    inputs: (M, *shape) float32. weights: (M,). targets: (M, C), soft labels or a difference of two soft
    labels. The term is linear in the targets, so two terms of opposite sign at a point cost one pass.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor

    def divided(self, count: int, draws: torch.Generator) -> Iterator[FunctionTerm | None]:
        """Split the points at random into `count` terms, one per step, with weights times `count`.

        Every point is in exactly one part, so all parts cost one pass over the points. Every part is an
        unbiased estimate of the whole term, which is their mean. None stands for a part without points.
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
    """Choose `points` random examples (or all, if fewer) of every class that is present, sorted by class."""
    rows, weights = [], []
    for c in sorted(set(targets.tolist())):
        members = (targets == c).nonzero()[:, 0].cpu()
        selected = members[torch.randperm(len(members), generator=draws)[:points]]
        rows.append(selected)
        weights += [len(members) / len(selected)] * len(selected) if len(selected) else []
    picked = (torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long)).to(inputs.device)
    return Memory(inputs[picked].flatten(1), torch.tensor(weights, device=inputs.device))
