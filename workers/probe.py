"""One number for how this process computes: two that have the same one give the same bits.

Versions and names of processors do not suffice. An Intel Xeon and an AMD EPYC with the same libraries and the
same capability (AVX512) give different model digests, because MKL and oneDNN choose their kernels by vendor.
So a probe computes one small federated round of the run's own model and algorithm and hashes its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np

from fedsim.errors import Interrupted
from fedsim.learning.gaussian import Point
from fedsim.problem import Problem
from fedsim.round_events import TaskId
from fedsim.wire.envelope import decode_own, encode
from fedsim.wire.state_file import encode_state
from workers.task_execution import execute

EXAMPLES = 32
SHORT = {"epochs": 1, "steps": 1, "samples": 1, "server_steps": 3}
"""Hyperparameters, by their last name, that make a round short."""
T = TypeVar("T")


def probe(problem: Problem) -> dict[str, str]:
    """The probe digest of this process by the kind of device that it computes on (cpu, cuda). A run may be
    begun by a process that computes on another kind than the process that resumes it."""
    return {problem.net.device.type: probe_digest(problem)}


def probe_digest(problem: Problem) -> str:
    """32 hexadecimal digits of one seeded round with one client of 32 examples: forward, backward, optimiser,
    curvature where the algorithm uses it, the fold, and an evaluation.

    Call workers.worker.main.fix_numerics before. An algorithm that cannot work on so few examples counts by
    the kind of its error, and the evaluation of the start model by its bits.
    """
    hashed = sha256()
    small = _small(problem)
    hashed.update(np.array(small.score(Point(problem.start), 0, 0).tally, "<f8").tobytes())
    try:
        for value in _round(small):
            hashed.update(encode_state(value))
    except Interrupted:
        raise
    except Exception as e:  # a user's algorithm may do anything; the same on every machine
        hashed.update(type(e).__name__.encode())
    return hashed.hexdigest()[:32]


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
    """Yield every upload and every state of the set-up's exchanges and the first round's, without codecs."""
    problem = replace(problem, experiment=replace(problem.experiment, codecs={}))
    algorithm = problem.algorithm
    ctx = problem.context(0, 0)
    server, client = algorithm.server_init(ctx), algorithm.client_init(ctx, 0)
    for r in (0, 1):
        for number in range(1, len(algorithm.exchanges_in(r)) + 1):
            ctx = problem.context(r, number)
            sent = algorithm.broadcast(server, ctx)
            down = decode_own(type(sent), encode(sent, {}, problem.dims), {}, problem.dims)
            result = execute(problem, TaskId(r, number, 0, 0), client, down)
            client = result.committed
            yield result.decoded
            server = algorithm.server_update(server, down, iter([(0, result.decoded)]), ctx)
            yield from (server, client)
