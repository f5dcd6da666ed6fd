"""An experiment made concrete: data, split, network, start, algorithm.

Every process builds its own from the same Experiment; it is a pure function of the experiment and
the data files, so nothing of it needs to be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.algorithm import Algorithm, Context, Exchange, Task
from fedsim.data.datasets import DATASETS, Dataset, load_dataset
from fedsim.data.partition import partition
from fedsim.errors import UsageError, unknown
from fedsim.experiment import Experiment
from fedsim.learning.models import build_model
from fedsim.learning.params import Net
from fedsim.learning.shard import Shard
from fedsim.seeds import Stream, seeded_torch
from fedsim.wire.codecs import codec
from fedsim.wire.messages import Dims, schema

CHUNK = 2000
"""Examples per evaluation chunk: fixed, so that float sums do not depend on who computes them."""


@dataclass(frozen=True)
class Problem:
    """What one process knows of the experiment. `clients` are training-row indices per client."""

    experiment: Experiment
    algorithm: Algorithm[Any, Any, Any, Any]
    dataset: Dataset
    clients: tuple[np.ndarray, ...]
    net: Net
    start: Tensor
    scale: float

    @staticmethod
    def build(
        experiment: Experiment,
        algorithm: Algorithm[Any, Any, Any, Any],
        data_dir: Path | None,
        device: str = "cpu",
    ) -> Problem:
        """Errors: UsageError or DataError, naming what does not exist or does not fit."""
        dataset = load_dataset(experiment.dataset, data_dir)
        clients = partition(
            experiment.partition,
            targets=dataset.train_targets,
            classes=dataset.classes,
            clients=experiment.clients,
            seed=experiment.seed,
            fraction=experiment.fraction,
            centres=dataset.centres,
        )
        shape = tuple(dataset.train_inputs.shape[1:])
        with seeded_torch(experiment.seed):
            module = build_model(experiment.model or algorithm.default_model, shape, dataset.classes)
        net = Net(module, torch.device(device))
        inputs = experiment.inputs or DATASETS[experiment.dataset].default_inputs
        scale = dataset.scale if inputs == "scaled" else 1.0
        problem = Problem(experiment, algorithm, dataset, clients, net, net.snapshot().cpu(), scale)
        problem.codecs  # noqa: B018  (checks the names now, not in round 1)
        return problem

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """N_k of all clients."""
        return tuple(len(rows) for rows in self.clients)

    @cached_property
    def dims(self) -> Dims:
        return {"P": self.net.layout.size, "C": self.dataset.classes, "K": len(self.clients)}

    @cached_property
    def codecs(self) -> Mapping[str, Mapping[str, str]]:
        """Codecs by direction and field, from `--codec field=codec` or `up.field=codec`."""
        sides: dict[str, dict[str, str]] = {"down": {}, "up": {}}
        known = {
            side: {f.name: f.kind.dtype for e in self.algorithm.exchanges for f in schema(getattr(e, side))}
            for side in sides
        }
        for name, chosen in self.experiment.codecs.items():
            lossy = codec(chosen).lossy
            direction, _, field = name.rpartition(".")
            if direction not in ("", "down", "up"):
                raise UsageError(f"--codec {name}: the direction is 'down' or 'up', not {direction!r}")
            hit = [s for s in sides if direction in ("", s) and field in known[s]]
            if not hit:
                raise unknown("message field", field, {*known["down"], *known["up"]})
            for side in hit:
                if lossy and not known[side][field].startswith("f"):
                    raise UsageError(f"--codec {name}={chosen}: {field!r} holds no floats")
                sides[side][field] = chosen
        return sides

    def exchange(self, number: int) -> Exchange:
        return self.algorithm.exchanges[number - 1]

    def context(self, round: int, exchange: int) -> Context:
        rng = Stream(self.experiment.seed, "server", round)
        return Context(self.start, self.net.layout, self.sizes, round, exchange, rng)

    def task(self, round: int, exchange: int, client: int) -> Task:
        rng = Stream(self.experiment.seed, f"client.{exchange}", round, client)
        return Task(self.start.to(self.net.device), self.sizes, round, exchange, client, rng)

    def shard(self, client: int) -> Shard:
        rows = self.clients[client]
        return Shard(
            self.net,
            torch.from_numpy(self.dataset.train_inputs[rows]).to(self.net.device),
            torch.from_numpy(self.dataset.train_targets[rows]).to(self.net.device),
            self.scale,
        )

    @property
    def chunks(self) -> int:
        """Number of evaluation chunks of the test set."""
        return -(-len(self.dataset.test_targets) // CHUNK)

    def score(self, weights: Tensor, chunk: int) -> tuple[int, float, int]:
        """Correct predictions, sum of NLL (nats, float64) and examples of one test chunk."""
        rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        inputs = torch.from_numpy(np.array(self.dataset.test_inputs[rows])).to(self.net.device)
        targets = torch.from_numpy(np.array(self.dataset.test_targets[rows])).to(self.net.device)
        floats = inputs.to(torch.float32)
        if self.scale != 1.0:
            floats = floats / self.scale
        logits = self.net.logits(weights.to(self.net.device), floats).double()
        nll = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        correct = (logits.argmax(dim=1) == targets).sum()
        return int(correct), float(nll), len(targets)
