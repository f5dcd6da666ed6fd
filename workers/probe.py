"""One number for how this process computes: two that have the same one give the same bits.

Versions and names of processors do not suffice. An Intel Xeon and an AMD EPYC with the same libraries and the
same capability (AVX512) give different model digests, because MKL and oneDNN choose their kernels by vendor.
So a probe computes one small federated round of the run's own model and algorithm and hashes its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np

from fedsim import plugins
from fedsim.errors import UsageError
from fedsim.learning.gaussian import Point
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from fedsim.wire.codecs import raw_bytes
from fedsim.wire.envelope import Buffer, decode_own, encode
from fedsim.wire.schema import map_tensors
from fedsim.wire.state_file import encode_state

EXAMPLES = 32
SHORT = {"epochs": 1, "steps": 1, "samples": 1, "server_steps": 3}
"""Hyperparameters, by their last name, that make a round short."""
T = TypeVar("T")


def probe(problem: Problem) -> dict[str, str]:
    """The probe digest of this process by the kind of device that it computes on (cpu, cuda). A run may be
    begun by a process that computes on another kind than the process that resumes it."""
    return {problem.net.device.type: probe_digest(problem)}


def probe_digest(problem: Problem) -> str:
    """Hash one small seeded computation: 32 hexadecimal digits.

    Every probe has an epoch of training and an evaluation of the run's own model, and its diagonal GGN where
    targets are classes. With an algorithm of the registry it also has one round of that algorithm with one
    client: set-up, local training, dual step and fold. A user's own algorithm is not called, because its code
    may keep something from call to call. Call fix_numerics before.
    """
    hashed = sha256()
    small = _small(problem)
    for value in _training(small):
        hashed.update(value)
    if not plugins.is_spec(problem.experiment.algo):
        for state in _round(small):
            hashed.update(encode_state(state))
    return hashed.hexdigest()[:32]


def _training(problem: Problem) -> Iterator[Buffer]:
    """One epoch of Adam on the run's model, the score and the curvature of what it gives."""
    shard, rng = problem.shard(0), RandomStream(problem.experiment.seed, "probe")
    start = problem.start.to(problem.net.device)
    fit = minimise(shard, start, how=LocalTraining(epochs=1), rng=rng)
    yield raw_bytes(fit.weights.cpu())
    yield np.array(problem.score(Point(fit.weights), 0, 0).tally, "<f8").tobytes()
    if problem.dataset.likelihood == "categorical":
        with suppress(UsageError):  # a layer of a user's model without a rule
            yield raw_bytes(shard.curvature(fit.weights, "exact", rng).cpu())


def shortened(value: T) -> T:
    """The same hyperparameters with those of SHORT in the place of larger ones."""
    changes: dict[str, Any] = {}
    for f in fields(value):  # type: ignore[arg-type]
        now = getattr(value, f.name)
        if f.name in SHORT and isinstance(now, int):
            changes[f.name] = min(now, SHORT[f.name])
        elif is_dataclass(now):
            changes[f.name] = shortened(now)
    return replace(value, **changes)  # type: ignore[type-var]


def _small(problem: Problem) -> Problem:
    """One client with the first training examples, scored on the first test examples."""
    data = problem.dataset
    few = replace(data, test_inputs=data.test_inputs[:EXAMPLES], test_targets=data.test_targets[:EXAMPLES])
    rows = np.arange(min(EXAMPLES, len(data.train_targets)))
    return replace(problem, algorithm=shortened(problem.algorithm), dataset=few, clients=(rows,))


def _round(problem: Problem) -> Iterator[Any]:
    """The set-up's exchanges and the first round's: each upload, and each state of server and client."""
    algorithm, device, dims = problem.algorithm, problem.net.device, problem.dims

    def carried(message: Any) -> Any:
        return decode_own(type(message), encode(message, {}, dims), {}, dims)

    ctx = problem.context(0, 0)
    server, client = algorithm.server_init(ctx), algorithm.client_init(ctx, 0)
    for r in (0, 1):
        for number in range(1, len(algorithm.exchanges_in(r)) + 1):
            ctx, task = problem.context(r, number), problem.task(r, number, 0)
            down = carried(algorithm.broadcast(server, ctx))
            there, here = (
                map_tensors(down, lambda t: t.to(device)),
                map_tensors(client, lambda t: t.to(device)),
            )
            draft, up = algorithm.client_update(here, there, problem.shard(0), task)
            seen = carried(map_tensors(up, lambda t: t.cpu()))
            draft = map_tensors(draft, lambda t: t.cpu())
            client = algorithm.client_commit(draft, down, seen, replace(task, start=problem.start))
            yield seen
            server = algorithm.server_update(server, down, iter([(0, seen)]), ctx)
            yield from (server, client)
