"""An experiment made concrete: data, split, network, start, algorithm.

Every process builds its own from the same Experiment; it is a pure function of the experiment and
the data files, so nothing of it needs to be sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.algorithm import Algorithm, Context, Exchange, Task
from fedsim.data.datasets import DATASETS, Dataset, load_dataset
from fedsim.data.digest import data_digest
from fedsim.data.holdout import hold_out
from fedsim.data.partitions import partition
from fedsim.error_feedback import error_feedback
from fedsim.errors import UsageError, unknown
from fedsim.experiment import Experiment, resolved_hyperparameters
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.metrics import MEASURES, Measure, Tally, added, classified
from fedsim.learning.models.paper_models import build_model
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard, as_floats
from fedsim.round_events import version
from fedsim.seeds import RandomStream, seeded_torch
from fedsim.virtual_clock import Clock, clock
from fedsim.wire.codecs import Codec, codec
from fedsim.wire.schema import TRIANGLE, Dims, FieldKind, all_fields, schema

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
        """See below.

        Raises:
            UsageError: if an argument is wrong.
            DataError: naming what does not exist or does not fit.
        """
        experiment = resolved(experiment, algorithm)
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
        examples, seed = len(dataset.train_targets), experiment.seed
        clients, held = hold_out(experiment.evaluate_on, examples, clients, seed)
        if held is not None:
            inputs, targets = dataset.train_inputs[held], dataset.train_targets[held]
            dataset = replace(dataset, test_inputs=inputs, test_targets=targets)
        net = _network(experiment, dataset, torch.device(device))
        algorithm.check(net.layout.size)
        for name, value in resolved_hyperparameters(algorithm).items():
            if name.endswith("optimiser") and value == "exact":
                raise UsageError(f"{name} = exact needs clients with a quadratic loss; a network has none")
        scale = dataset.scale if experiment.inputs == "scaled" else 1.0
        problem = Problem(experiment, algorithm, dataset, clients, net, net.snapshot().cpu(), scale)
        lossy = frozenset(name for name, selected in problem.codecs["up"].items() if codec(selected).lossy)
        if experiment.error_feedback:
            problem = replace(problem, algorithm=error_feedback(algorithm, lossy))
        return problem

    @staticmethod
    def outline(
        experiment: Experiment, algorithm: Algorithm[Any, Any, Any, Any], data_dir: Path | None
    ) -> Problem:
        """What messages need, without a split: every client has the one example 0. For plans of any K.

        Raises:
            FedsimError: as build, but for the partition.
        """
        experiment = resolved(experiment, algorithm)
        dataset = load_dataset(experiment.dataset, data_dir)
        net = _network(experiment, dataset, torch.device("cpu"))
        algorithm.check(net.layout.size)
        clients = (np.zeros(1, dtype=np.int64),) * experiment.clients
        problem = Problem(experiment, algorithm, dataset, clients, net, net.snapshot(), 1.0)
        problem.codecs  # noqa: B018  (checks the names)
        return problem

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """N_k of all clients."""
        return tuple(len(rows) for rows in self.clients)

    @cached_property
    def data_digest(self) -> str:
        """Of everything that the experiment reads (fedsim.data.digest)."""
        return data_digest(self.dataset, self.clients)

    @cached_property
    def dims(self) -> Dims:
        size, clients, classes = self.net.layout.size, len(self.clients), self.dataset.classes
        return {
            "P": size,
            TRIANGLE: size * (size + 1) // 2,
            "C": classes,
            "K": clients,
            "I": int(np.prod(self.dataset.train_inputs.shape[1:])),
            **self.algorithm.sizes_on_wire(clients, classes),
        }

    @cached_property
    def clock(self) -> Clock | None:
        """The virtual clock, if there is one."""
        e = self.experiment
        return clock(e.link, e.compute, e.deadline, clients=e.clients, seed=e.seed)

    @cached_property
    def largest_field(self) -> int:
        """Bytes of the largest field that an envelope of this run may carry, of the widest dtype."""
        kinds = [t for e in self.exchanges for t in (e.down, e.up)]
        sizes = [f.dense_bytes(self.dims) for t in kinds for f in all_fields(t)]
        return max(sizes, default=0)

    @cached_property
    def codecs(self) -> Mapping[str, Mapping[str, str]]:
        """Codecs by direction and field, from `--codec field=codec` or `up.field=codec`."""
        sides: dict[str, dict[str, str]] = {"down": {}, "up": {}}
        fields = {side: [f for e in self.exchanges for f in all_fields(getattr(e, side))] for side in sides}
        known = {side: {f.name for f in fields[side]} for side in sides}
        for name, selected in self.experiment.codecs.items():
            created = codec(selected)
            direction, _, field = name.rpartition(".")
            if direction not in ("", "down", "up"):
                raise UsageError(f"--codec {name}: the direction is 'down' or 'up', not {direction!r}")
            hit = [s for s in sides if direction in ("", s) and field in known[s]]
            if not hit:
                raise unknown("message field", field, known["down"] | known["up"])
            for side in hit:
                for kind in dict.fromkeys(f.kind for f in fields[side] if f.name == field):
                    if why := self.unfit(created, side, field, kind):
                        raise UsageError(f"--codec {name}={selected}: {why}")
                sides[side][field] = created.name
        return sides

    def unfit(self, created: Codec, side: str, field: str, kind: FieldKind) -> str:
        """Why a codec cannot encode this field; '' if it can."""
        floats = kind.dtype.startswith("f")
        if (created.lossy or created.delta) and not floats:
            return f"{field!r} holds no floats"
        if (created.lossy or created.delta) and kind.stored and self.dataset.train_inputs.dtype == np.uint8:
            return (
                f"{field!r} is sent as it is stored, in whole numbers of one byte; this codec is for floats"
            )
        if created.lossy and kind.dims == (TRIANGLE,) and (kind.positive or created.kinds is not None):
            return (
                "a full precision whose entries are rounded or left out one by one is in general not "
                "positive definite any more; send it dense or by a lossless codec"
            )
        if created.kinds is not None and kind.name not in created.kinds:
            return f"{created.why}, and {field!r} is a {kind.name}"
        if created.delta and side == "down":
            return (
                "a broadcast has nothing to refer to, because a client may have missed the last one; "
                f"use it upwards (up.{field})"
            )
        if created.delta and not all(_refers(e, field, kind) for e in self.exchanges):
            return (
                f"the broadcast has no field {field!r} of the same shape to refer to; use zstd, "
                "which needs none"
            )
        return ""

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All that a run may have: the set-up's, and a round's."""
        return (*self.algorithm.setup, *self.algorithm.exchanges)

    def version(self, round: int, exchange: int) -> int:
        """The version of a client's state that a task of this exchange makes."""
        return version(round, exchange, len(self.algorithm.exchanges), len(self.algorithm.setup))

    def exchange(self, round: int, number: int) -> Exchange:
        """Round 0 is the set-up."""
        return self.algorithm.exchanges_in(round)[number - 1]

    def context(self, round: int, exchange: int) -> Context:
        rng = RandomStream(self.experiment.seed, "server", round)
        layout, sizes = self.net.layout, self.sizes
        return Context(self.start, layout, sizes, round, exchange, rng, lambda: self.server_net, self.read)

    def read(self, stored: Tensor) -> Tensor:
        """Stored inputs (n, ...) as the network takes them: (n, *shape) float32 on its device."""
        shape = tuple(self.dataset.train_inputs.shape[1:])
        return as_floats(stored.to(self.net.device), shape, self.scale)

    @cached_property
    def server_net(self) -> Net:
        """A second network, because the server computes in a thread beside evaluation and, in process,
        beside clients, and a network's buffers are scratch space."""
        return _network(self.experiment, self.dataset, self.net.device)

    def task(self, round: int, exchange: int, client: int) -> Task:
        rng = RandomStream(self.experiment.seed, f"client.{exchange}", round, client)
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

    @property
    def measure(self) -> Measure:
        """What the data set's likelihood lets one say about predictions."""
        return MEASURES[self.dataset.likelihood]

    @property
    def eval_samples(self) -> int:
        """Posterior samples to average predictions over; 0 where targets are not classes."""
        return self.experiment.eval_samples if self.measure.averages else 0

    def score(self, model: Point | Gaussian, chunk: int, round: int) -> ChunkScore:
        """One test chunk, at the mean of `model` and, if it is a Gaussian and posterior samples are
        asked for, with the softmax averaged over samples of it (the same ones for every chunk)."""
        rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        inputs = torch.from_numpy(np.array(self.dataset.test_inputs[rows])).to(self.net.device)
        targets = torch.from_numpy(np.array(self.dataset.test_targets[rows])).to(self.net.device)
        floats = self.read(inputs)

        def logits(weights: Tensor, rows: Tensor) -> Tensor:
            return self.net.logits(weights.to(self.net.device), rows).double()

        measure = self.measure
        pieces = zip(torch.split(floats, measure.rows), torch.split(targets, measure.rows), strict=True)
        tally = reduce(added, (measure.tally(logits(model.mean, x), y) for x, y in pieces))
        count = self.eval_samples
        if not count or isinstance(model, Point):
            return ChunkScore(tally)
        rng = RandomStream(self.experiment.seed, "posterior", round)
        total = torch.full((len(targets), self.dataset.classes), -math.inf, dtype=torch.float64)
        total = total.to(floats.device)
        for weights in model.samples(count, rng.torch("samples")):  # in logs: a probability may underflow
            total = torch.logaddexp(total, logits(weights, floats).log_softmax(dim=1))
        return ChunkScore(tally, classified(total - math.log(count), targets))


def _refers(exchange: Exchange, field: str, kind: FieldKind) -> bool:
    """Whether every broadcast of an exchange that sends `field` up has one of the same name and shape."""
    if field not in {f.name for f in all_fields(exchange.up)}:
        return True
    down = {f.name: f for f in schema(exchange.down) if f.python is Tensor and not f.kind.elastic}
    return field in down and (down[field].kind.dims, down[field].kind.dtype) == (kind.dims, kind.dtype)


class ChunkScore(NamedTuple):
    """Of one test chunk: the tally of the model's mean, and that of the average over posterior samples
    (none: there was no average)."""

    tally: Tally
    ensemble: Tally = ()


def resolved(experiment: Experiment, algorithm: Algorithm[Any, Any, Any, Any]) -> Experiment:
    """The experiment with what it leaves to the algorithm and the data set filled in."""
    info = DATASETS.get(experiment.dataset)
    samples = algorithm.eval_samples if experiment.eval_samples < 0 else experiment.eval_samples
    return replace(
        experiment,
        model=experiment.model or algorithm.default_model,
        inputs=experiment.inputs or (info.default_inputs if info else "scaled"),
        rounds=algorithm.default_rounds if experiment.rounds < 0 else experiment.rounds,
        eval_samples=samples,
    )


def _network(experiment: Experiment, dataset: Dataset, device: torch.device) -> Net:
    shape = tuple(dataset.train_inputs.shape[1:])
    with seeded_torch(experiment.seed):
        module = build_model(experiment.model, shape, dataset.classes, dataset.likelihood)
        return Net(module, device, likelihood(dataset.likelihood))
