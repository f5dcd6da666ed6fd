"""Compute the probe digest: two processes with the same digest compute the same bits.

Equal versions and processors are not enough. An Intel Xeon and an AMD EPYC with the same libraries and the
same capability (AVX512) give different model digests, because MKL and oneDNN choose their kernels by vendor.
The probe computes one small federated round of the run's own model and algorithm and hashes its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from fedsim import plugins
from fedsim.errors import FedsimError, UsageError
from fedsim.learning.gaussian import Point
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.plugins import WEIGHTS
from fedsim.problem import Problem
from fedsim.round_events import TaskId
from fedsim.seeds import RandomStream
from fedsim.wire.codecs import raw_bytes
from fedsim.wire.envelope import Buffer
from fedsim.wire.state_file import state_chunks
from workers.task_execution import execute

EXAMPLES = 32
SHORT = {"epochs": 1, "steps": 1, "samples": 1, "server_steps": 3}
"""The largest values of hyperparameters in a probe, by the last part of their names, for a short round."""
T = TypeVar("T")


def probe(problem: Problem) -> dict[str, str]:
    """Return this process's probe digest with its kind of device (cpu, cuda) as key, because a run may be
    resumed on another kind of device."""
    return {problem.net.device.type: probe_digest(problem)}


def probe_digest(problem: Problem) -> str:
    """Return the hash of one small seeded computation, as 32 hexadecimal digits.

    The probe trains the run's model for one epoch and evaluates it. If targets are classes, it computes the
    diagonal of the generalised Gauss-Newton matrix. For an algorithm of the registry, it adds one round with
    one client: set-up, local training, dual step and fold. A user's algorithm is not called, because its code
    may keep state between calls. Call workers.assembly.fix_numerics first.
    """
    hashed = sha256()
    small = _small(problem)
    for value in _training(small):
        hashed.update(value)
    if not plugins.is_spec(problem.experiment.algo):
        for state in _round(small):
            for chunk in state_chunks(state):  # in pieces: a copy of a large state needs much memory
                hashed.update(chunk)
    return hashed.hexdigest()[:32]


def check_repeatable(problem: Problem, data_dir: Path | None) -> None:
    """Check that a user's data set and model return the same numbers when they are called again.

    Otherwise runs are not reproducible and processes disagree. Built-in data sets and models are skipped.

    Raises:
        UsageError: if numbers differ; the message says which numbers of which file.
    """
    e = problem.experiment
    dataset, model = plugins.is_spec(e.dataset), e.model.partition(WEIGHTS)[0]
    if dataset or plugins.is_spec(model):
        again = _built_again(problem, data_dir)
        if dataset and again.data_digest != problem.data_digest:
            raise _other_numbers("--dataset", e.dataset, "data", "numpy.random.default_rng(SEED)")
        if not torch.equal(again.start, problem.start):
            raise _other_numbers("--model", model, "weights at the start", SEEDED)
    if plugins.is_spec(model):
        with plugins.user_code_errors(model, "--model", "an epoch of training"):
            first, second = (list(_training(_small(problem))) for _ in range(2))
        if any(bytes(a) != bytes(b) for a, b in zip(first, second, strict=True)):
            raise _other_numbers("--model", model, "results of training", SEEDED)


def _built_again(problem: Problem, data_dir: Path | None) -> Problem:
    e, algorithm = problem.experiment, problem.algorithm.unwrapped
    try:
        with plugins.executed_anew():
            return Problem.build(e, algorithm, data_dir)
    except FedsimError:  # a file that can be executed only once, for example if it registers a torch operator
        return Problem.build(e, algorithm, data_dir)


SEEDED = "torch's generator (torch.rand, nn.Dropout), which the run seeds"


def _other_numbers(option: str, spec: str, what: str, instead: str) -> UsageError:
    return UsageError(
        f"{option} {plugins.short(spec)} gives other numbers each time: its {what} differ when it is asked "
        f"again. Draw from {instead}, not from numpy.random, random or a clock"
    )


def _training(problem: Problem) -> Iterator[Buffer]:
    """Yield the bytes of the weights after one epoch of Adam, of their score and of their curvature."""
    shard, rng = problem.shard(0), RandomStream(problem.experiment.seed, "probe")
    start = problem.start.to(problem.net.device)
    problem.net.statistics.copy_(problem.statistics)
    weights = minimise(shard, start, how=LocalTraining(epochs=1), rng=rng, round=1).solution
    yield raw_bytes(weights.cpu())
    own = problem.evaluation.measure.own(
        problem.dataset.classes
    )  # keeps digests comparable with earlier versions
    yield np.array(problem.evaluation.score(Point(weights), 0, 0).tally[:own], "<f8").tobytes()
    if problem.dataset.likelihood == "categorical":
        with suppress(UsageError):  # a layer of a user's model has no curvature rule
            yield raw_bytes(shard.curvature(weights, "exact", rng).cpu())


def shortened(value: T) -> T:
    """Return the hyperparameters with values limited to those of SHORT."""
    changes: dict[str, Any] = {}
    for f in fields(value):  # type: ignore[arg-type]
        now = getattr(value, f.name)
        if f.name in SHORT and isinstance(now, int):
            changes[f.name] = min(now, SHORT[f.name])
        elif is_dataclass(now):
            changes[f.name] = shortened(now)
    return replace(value, **changes)  # type: ignore[type-var]


def _small(problem: Problem) -> Problem:
    """Return a problem of one client with the first training examples, scored on the first test examples."""
    data = problem.dataset
    few = replace(
        data,
        test_inputs=data.test_inputs[:EXAMPLES],
        test_targets=data.test_targets[:EXAMPLES],
        test_centres=None,
    )
    rows = np.arange(min(EXAMPLES, len(data.train_targets)))
    return replace(problem, algorithm=shortened(problem.algorithm), dataset=few, clients=(rows,))


def _round(problem: Problem) -> Iterator[Any]:
    """Yield all uploads and states of the set-up and the first round, without codecs and asynchrony."""
    problem = replace(problem, experiment=replace(problem.experiment, codecs={}, asynchronous=""))
    algorithm = problem.algorithm
    ctx = problem.context(0, 0)
    server, client = algorithm.server_init(ctx), algorithm.client_init(ctx, 0)
    for r in (0, 1):
        for number in range(1, len(algorithm.exchanges_in(r)) + 1):
            ctx = problem.context(r, number, asked=1)
            sent = algorithm.broadcast(server, ctx)
            _, down = problem.messages.sent(sent)
            client, up = _committed(problem, TaskId(r, number, 0, 0), client, down)
            yield up
            server = algorithm.server_update(server, down, [ctx.arrival(0, down, up)], ctx)
            del up, sent, down
            yield from (server, client)


def _committed(problem: Problem, of: TaskId, client: Any, down: Any) -> tuple[Any, Any]:
    """Compute a task; return the client's next state, and the upload as the server decodes it."""
    result = execute(problem, of, client, down, 0, 1)
    return result.committed, result.decoded
