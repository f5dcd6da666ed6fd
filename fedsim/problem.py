"""The problem of an experiment: its data, split, network, initial weights and algorithm.

Every process builds its own problem from the same Experiment. A problem is a pure function of the experiment
and the data files, so no part of it needs to be sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim import event_rules, plugins
from fedsim.algorithm import Algorithm, At, Context, Task
from fedsim.compression import converges, expanded
from fedsim.data.arrays import data_digest
from fedsim.data.datasets import Dataset, load_dataset
from fedsim.data.holdout import hold_out, set_aside
from fedsim.data.partitions import partition
from fedsim.device_copies import DeviceCopies
from fedsim.error_feedback import error_feedback
from fedsim.errors import UsageError
from fedsim.evaluation import Evaluation, own_test_rows
from fedsim.event_trigger import event_triggered
from fedsim.experiment import Experiment, resolved, resolved_hyperparameters
from fedsim.feature_pairs import LAST, NOT_FULL, OWN, check_pairs
from fedsim.learning.frozen import frozen_digest, frozen_tensors, put_frozen
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.models.registry import network_of
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard, as_floats
from fedsim.messages import Messages
from fedsim.own_references import OwnReferences
from fedsim.process_settings import settings_kept
from fedsim.rounds import Rounds
from fedsim.running_statistics import with_statistics
from fedsim.seeds import RandomStream
from fedsim.tree import check_tree
from fedsim.wire.codecs import codec
from fedsim.wire.gaussian_messages import check_size
from fedsim.wire.schema import RUNNING, TRIANGLE


@dataclass(frozen=True)
class Problem:
    """The data, network and algorithm of an experiment in one process.

    clients: the training-row indices of each client; a centralised algorithm has one client with the rows of
    all `experiment.clients`. statistics: the network's initial running statistics, shape (R,)."""

    experiment: Experiment
    algorithm: Algorithm[Any, Any, Any, Any]
    dataset: Dataset
    clients: tuple[np.ndarray, ...]
    net: Net
    start: Tensor
    statistics: Tensor
    public: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The training rows whose inputs, but not labels, the server and all clients have."""
    split: tuple[np.ndarray, ...] = ()
    """The rows of each of the `experiment.clients` clients, for scores per client. They differ from `clients`
    only for a centralised algorithm. In an outline they are missing."""

    @staticmethod
    def build(
        experiment: Experiment,
        algorithm: Algorithm[Any, Any, Any, Any],
        data_dir: Path | None,
        device: str = "cpu",
    ) -> Problem:
        """Build the problem of an experiment: load its data and divide them among the clients.

        Raises:
            UsageError: If an argument is wrong.
            DataError: If a data file is missing or does not fit the options; the message names it.
        """
        experiment = resolved(experiment, algorithm)
        with settings_kept():  # loading a user's file executes it
            for option, choice in plugins.computing_options(experiment):
                if plugins.is_spec(choice):
                    plugins.load(choice, option)
        dataset = load_dataset(experiment.dataset, data_dir)
        _check_until(experiment, dataset)
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
        clients, public = set_aside(algorithm.public_inputs, clients, seed)
        split, clients = clients, _held_by(algorithm, clients)
        if held is not None:
            inputs, targets = dataset.train_inputs[held], dataset.train_targets[held]
            dataset = replace(dataset, test_inputs=inputs, test_targets=targets)
            if dataset.test_centres is not None and dataset.centres is not None:
                dataset = replace(dataset, test_centres=dataset.centres[held])
        net = network_of(experiment, dataset, torch.device(device))
        _check_size(algorithm, net.layout.size)
        for name, value in resolved_hyperparameters(algorithm).items():
            if name.endswith("optimiser") and value == "exact":
                raise UsageError(f"{name} = exact needs clients with a quadratic loss; a network has none")
        if experiment.inputs != "scaled":
            dataset = replace(dataset, scale=1.0)
        start, running = net.snapshot().cpu(), net.statistics.clone().cpu()
        algorithm = with_statistics(algorithm, experiment.statistics, running)
        data = (dataset, clients, net, start, running, public, split)
        problem = _compressed(Problem(experiment, algorithm, *data))
        experiment = problem.experiment
        lossy = frozenset(
            name for name, selected in problem.messages.codecs["up"].items() if codec(selected).lossy
        )
        if experiment.error_feedback:
            problem = replace(problem, algorithm=error_feedback(algorithm, lossy))
        return _with_features(problem)

    @staticmethod
    def outline(
        experiment: Experiment, algorithm: Algorithm[Any, Any, Any, Any], data_dir: Path | None
    ) -> Problem:
        """Build a problem without a split, for plans with any number of clients.

        Every client has only example 0. Message sizes are those of the full problem.

        Raises:
            FedsimError: If the options are wrong; errors of the partition are left to `build`.
        """
        experiment = resolved(experiment, algorithm)
        dataset = load_dataset(experiment.dataset, data_dir)
        _check_until(experiment, dataset)
        net = network_of(experiment, dataset, torch.device("cpu"))
        _check_size(algorithm, net.layout.size)
        clients = _held_by(algorithm, (np.zeros(1, dtype=np.int64),) * experiment.clients)
        start, running = net.snapshot(), net.statistics.clone()
        algorithm = with_statistics(algorithm, experiment.statistics, running)
        problem = Problem(experiment, algorithm, dataset, clients, net, start, running)
        return _with_features(_compressed(problem))

    def beside(self) -> Problem:
        """Return the same problem with a second network, for a task that runs in parallel with another one.

        Both problems share the frozen tensors, the copies on the device, and all cached values except
        `evaluation`, which computes on the network.
        """
        net = network_of(self.experiment, self.dataset, self.net.device)
        put_frozen(net.module, frozen_tensors(self.net.module))
        other, shared = replace(self, net=net), {**vars(self), "copies": self.copies}
        vars(other).update({k: v for k, v in shared.items() if k not in ("net", "evaluation")})
        return other

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of training rows of each client, N_k."""
        return tuple(len(rows) for rows in self.clients)

    @cached_property
    def public_inputs(self) -> Tensor:
        """The public inputs as stored, flattened: (M, I)."""
        return torch.from_numpy(self.dataset.train_inputs[self.public]).flatten(1)

    @cached_property
    def data_digest(self) -> str:
        """The digest of everything that the experiment reads (fedsim.data.arrays.data_digest)."""
        d = self.dataset
        tested = self.evaluation.test_clients
        own = () if tested is None else (tested,)
        test = (d.test_inputs, d.test_targets, *own)
        return data_digest((d.train_inputs, d.train_targets), test, self.clients)

    @cached_property
    def frozen_digest(self) -> str:
        """The digest of the frozen tensors (fedsim.learning.frozen); '' if all tensors are trained."""
        return frozen_digest(self.net.module, self.net.kept)

    @cached_property
    def messages(self) -> Messages:
        """The exchanges, codecs and sizes of the messages."""
        size, clients, classes = self.net.layout.size, len(self.clients), self.dataset.classes
        running, inputs = len(self.statistics), self.dataset.train_inputs
        dims = {
            "P": size,
            TRIANGLE: size * (size + 1) // 2,
            "C": classes,
            "K": clients,
            "L": self.evaluation.samples,
            "I": int(np.prod(inputs.shape[1:])),
            **({RUNNING: running} if running else {}),
            **self.algorithm.sizes_on_wire(clients, classes),
        }
        stored = "u8" if inputs.dtype == np.uint8 else "f32"
        return Messages(self.algorithm, dims, self.net.layout, self.experiment.codecs, stored)

    @cached_property
    def rounds(self) -> Rounds:
        """Who takes part in each round, over which edge servers and links, and by which policy."""
        return Rounds(self.experiment, self.algorithm, self.messages, self.sizes)

    def context(self, round: int, exchange: int, folds: int = 0, asked: int = 0) -> Context:
        rng, tree = RandomStream(self.experiment.seed, "server", round), self.rounds.tree
        return Context(
            self.start,
            self.net.layout,
            self.sizes,
            round,
            exchange,
            rng,
            network=lambda: self.server_net,
            read=self.read,
            folds=folds,
            asked=self.rounds.counted(asked),
            public=self.public_inputs,
            mixed=any(self.rounds.policy.staleness(round)),
            edge_of=tree.edge_of if tree is not None and tree.sums(round) else None,
        )

    def read(self, stored: Tensor) -> Tensor:
        """Convert stored inputs (n, ...) to the network's inputs, (n, *shape) float32 on its device."""
        return as_floats(
            stored.to(self.net.device), tuple(self.dataset.train_inputs.shape[1:]), self.dataset.scale
        )

    @cached_property
    def server_net(self) -> Net:
        """A second network, because the server computes in parallel with evaluation and clients."""
        return network_of(self.experiment, self.dataset, self.net.device)

    def task(self, round: int, exchange: int, client: int, folds: int = 0, asked: int = 0) -> Task:
        rng = RandomStream(self.experiment.seed, f"client.{exchange}", round, client)
        start, public = self.copies.get("start", 0, lambda: (self.start, self.public_inputs))
        weight = self.rounds.policy.weight(round, client)
        counted = self.rounds.counted(asked)
        return Task(start, self.sizes, round, exchange, client, rng, folds, counted, public, weight)

    @cached_property
    def copies(self) -> DeviceCopies:
        """The tensors that the network's device keeps between tasks."""
        return DeviceCopies(self.net.device)

    def shard(self, client: int) -> Shard:
        """Return a client's examples, with the network that all clients share."""

        def stored() -> tuple[Tensor, Tensor]:
            d, rows = self.dataset, self.clients[client]
            return torch.from_numpy(d.train_inputs[rows]), torch.from_numpy(d.train_targets[rows])

        inputs, targets = self.copies.get(("examples", client), 0, stored)
        return Shard(self.net, inputs, targets, self.dataset.scale)

    @cached_property
    def evaluation(self) -> Evaluation:
        """The evaluation of models on the test set."""
        e = self.experiment
        local = self.statistics if e.statistics == "local" else None
        tested = own_test_rows(self.dataset, e.partition, self.split)
        return Evaluation(
            self.net, self.dataset, self.read, e.seed, e.eval_samples, tested, self.split, local
        )


def _compressed(problem: Problem) -> Problem:
    """Return the problem with the codecs of its --compress; a field with a --codec keeps that one."""
    if problem.experiment.compress == "none":
        return problem
    e, algorithm, rounds = problem.experiment, problem.algorithm, problem.rounds
    references = {OWN: "+own", LAST: "+last"} if NOT_FULL not in rounds.features else {OWN: "+own"}
    usable = (text for name, text in references.items() if not _excluded(name, problem))
    asked = len(rounds.schedule()(1).participants)
    at, level = problem.context(1, 1, asked=asked).at(), e.compress
    damping = algorithm.dual_damping(at) if algorithm.duals else 1 / max(asked, 1)
    if damping == 1:  # not named as a damping: gamma of ivon_admm
        damping = at.value(getattr(algorithm, "gamma", 1.0))
    if level == "fewest-bits" and not converges(damping):
        level = "few-bits"
    codecs = expanded(level, problem.messages.exchanges, problem.messages.unfit, next(usable, ""))
    added = {k: v for k, v in codecs.items() if k not in e.codecs and k.partition(".")[2] not in e.codecs}
    return replace(problem, experiment=replace(e, compress="none", codecs={**e.codecs, **added}))


def _excluded(reference: str, problem: Problem) -> bool:
    """Return whether broadcasts cannot refer to the last one, or to each client's own last one."""
    try:
        check_pairs(problem.rounds.features | {reference})
        if reference == OWN:
            OwnReferences(problem.algorithm)
    except UsageError:
        return True
    return len(problem.messages.exchanges) > 1


def _with_features(problem: Problem) -> Problem:
    """Return the problem with its algorithm wrapped for +event, +quiet and +own.

    Raises:
        UsageError: If features exclude each other, or do not fit the algorithm.
    """
    _, up, down = event_rules.split(problem.experiment.participation)
    features = problem.rounds.features
    check_pairs(features)
    wrapped = OwnReferences(problem.algorithm) if OWN in features else problem.algorithm
    problem = replace(problem, algorithm=event_triggered(wrapped, up, down, At(problem.sizes)))
    policy, tree = problem.rounds.policy, problem.rounds.tree
    if tree is not None:
        policy.check_edges(problem.sizes, tree.merges)
        check_tree(tree, problem.algorithm)
    return problem


def _held_by(
    algorithm: Algorithm[Any, Any, Any, Any], rows: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
    """Return the rows of the algorithm's clients; a centralised algorithm has one client with all rows."""
    return (np.unique(np.concatenate(rows)),) if algorithm.centralised else rows


def _check_size(algorithm: Algorithm[Any, Any, Any, Any], params: int) -> None:
    """Check that the algorithm and its messages can work on a model of P = `params` parameters."""
    for exchange in (*algorithm.setup, *algorithm.exchanges):
        for message in (exchange.down, exchange.up):
            check_size(message, params)
    algorithm.check(params)


def _check_until(experiment: Experiment, dataset: Dataset) -> None:
    """Check that a run with a target accuracy has a test accuracy.

    Raises:
        UsageError: If there is none.
    """
    if experiment.until and not likelihood(dataset.likelihood).has_accuracy:
        raise UsageError(
            f"--until: {plugins.short(experiment.dataset)} has no test accuracy that a run could reach: its "
            f"targets are {dataset.likelihood}"
        )
