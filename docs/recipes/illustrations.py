"""What the illustrations share: a command line with a data folder, few digits, a federation in memory."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from report import ROOT
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Context, Task
from fedsim.data import load_dataset
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.params import Layout
from fedsim.seeds import RandomStream


def options(what: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """`--out`, `--quick` and `--data-dir`."""
    folder = os.environ.get("FEDSIM_DATA")
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the results")
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds' worth on data that need no files"
    )
    parser.add_argument(
        "--data-dir", type=Path, default=Path(folder) if folder else None, help="default: $FEDSIM_DATA"
    )
    return parser.parse_args(argv)


def first_images(count: int, side: int, selected: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """MNIST's first `count` training images at side x side pixels in [0, 1], (count, 1, side, side) float64,
    and their digits (count,). A quick run has scikit-learn's 8x8 digits instead.

    Every (28 / side)-th pixel is taken, which is what the released code does ("nearest").
    """
    data = load_dataset("digits" if selected.quick else "mnist", selected.data_dir)
    images = torch.from_numpy(np.array(data.train_inputs[:count])).double() / data.scale
    digits = torch.from_numpy(np.array(data.train_targets[:count]))
    return F.interpolate(images, size=side), digits


@dataclass
class Federation:
    """The algorithms' own methods without a process or a socket, all clients in every round.

    For pictures of what an algorithm knows after every round: a run keeps only its last checkpoints.
    Messages are rounded to float32, as on the wire, unless `wide`. start: (P,) before round 1.
    """

    algorithm: Algorithm[Any, Any, Any, Any]
    shards: Sequence[AnyShard]
    start: Tensor
    seed: int = 0
    wide: bool = False
    round: int = 0
    server: Any = None
    clients: list[Any] = field(default_factory=list)
    ups: dict[int, Any] = field(default_factory=dict)
    """The uploads of the last exchange, as the server got them."""
    values: int = 0
    """Numbers that one client has sent and received in messages' tensors, so far."""

    def __post_init__(self) -> None:
        self.sizes = tuple(shard.size for shard in self.shards)
        self.server = self.algorithm.server_init(self._context(1))
        self.clients = [self.algorithm.client_init(self._context(1), k) for k in range(len(self.shards))]

    @property
    def model(self) -> Point | Gaussian:
        """What would be evaluated now."""
        return self.algorithm.model(self.server, self._context(1))

    def play(self) -> Point | Gaussian:
        """One round, before the first of all the set-up."""
        if not self.round:
            for number in range(1, len(self.algorithm.setup) + 1):
                self._exchange(number)
        self.round += 1
        for number in range(1, len(self.algorithm.exchanges) + 1):
            self._exchange(number)
        return self.model

    def _context(self, exchange: int) -> Context:
        layout, rng = Layout.vector(len(self.start)), RandomStream(self.seed, "server", self.round)
        return Context(self.start, layout, self.sizes, self.round, exchange, rng)

    def _exchange(self, number: int) -> None:
        context = self._context(number)
        down = self._sent(self.algorithm.broadcast(self.server, context))
        self.ups = {}
        for k, shard in enumerate(self.shards):
            rng = RandomStream(self.seed, f"client.{number}", self.round, k)
            task = Task(self.start, self.sizes, self.round, number, k, rng, folds=max(0, self.round - 1))
            draft, up = self.algorithm.client_update(self.clients[k], down, shard, task)
            self.ups[k] = up = self._sent(up)
            self.clients[k] = self.algorithm.client_commit(draft, down, up, task)
        self.values += sum(_size(message) for message in (down, self.ups[0]))
        self.server = self.algorithm.server_update(
            self.server, down, [context.arrival(k, down, up) for k, up in self.ups.items()], context
        )

    def _sent(self, message: Any) -> Any:
        dtype = torch.float64 if self.wide else torch.float32
        return replace(message, **{name: value.to(dtype) for name, value in _tensors(message)})


def _tensors(message: Any) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in vars(message).items() if isinstance(value, Tensor)]


def _size(message: Any) -> int:
    return sum(value.numel() for _, value in _tensors(message))
