"""The job that every program has: read its settings, train a client, evaluate, report. It imports nothing of
fedsim, because it runs in every peer's environment.

A client's order of examples depends on nothing but round and client, so that a tool whose arithmetic does not
depend on the order of arrival has equal digests.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

torch.set_num_threads(1)


@cache
def settings() -> dict[str, Any]:
    """The settings of the command, from the file that PEERS_JOB names: also in a worker of a tool."""
    with open(os.environ["PEERS_JOB"], encoding="utf-8") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


@cache
def _data() -> dict[str, np.ndarray]:
    with np.load(settings()["data"]) as file:
        return dict(file)


def shard(client: int) -> tuple[Tensor, Tensor]:
    """A client's inputs (n, 784) float32 in [0, 1] and its classes (n,)."""
    return _tensors(_data()["inputs"][client], _data()["targets"][client])


def test_set() -> tuple[Tensor, Tensor]:
    """The inputs and classes that the model of each round is evaluated on."""
    return _tensors(_data()["test_inputs"], _data()["test_targets"])


def _tensors(inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
    """Both on the device of the settings."""
    device = settings()["device"]
    return torch.from_numpy(inputs).to(device).float() / 255.0, torch.from_numpy(targets).to(device)


def model() -> nn.Module:
    """The MLP 784-200-100-10 with the weights that all tools begin with."""
    net = nn.Sequential(
        nn.Linear(784, 200), nn.Sigmoid(), nn.Linear(200, 100), nn.Sigmoid(), nn.Linear(100, 10)
    )
    nn.utils.vector_to_parameters(torch.from_numpy(_data()["start"].copy()), net.parameters())
    return net.to(settings()["device"])


def train(net: nn.Module, client: int, round: int) -> int:
    """One epoch of SGD in place; returns the number of examples."""
    inputs, targets = shard(client)
    order = torch.Generator().manual_seed(1000 * round + client)
    optimiser = torch.optim.SGD(net.parameters(), lr=settings()["lr"])
    net.train()
    for rows in torch.randperm(len(targets), generator=order).split(settings()["batch"]):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs[rows]), targets[rows]).backward()
        optimiser.step()
    return len(targets)


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """The share of the test examples that are classified correctly."""
    inputs, targets = test_set()
    net.eval()
    right = sum(
        int((net(x).argmax(1) == y).sum())
        for x, y in zip(inputs.split(1000), targets.split(1000), strict=True)
    )
    return right / len(targets)


def end_of_round(round: int, net: nn.Module) -> None:
    """Evaluate, and print that a round has ended."""
    print(json.dumps({"round": round, "accuracy": accuracy(net)}), flush=True)


def end(net: nn.Module) -> None:
    """Print the digest of the final model."""
    values = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).cpu().numpy()
    print(json.dumps({"sha256": hashlib.sha256(values.tobytes()).hexdigest()}), flush=True)
