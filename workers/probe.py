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
from fedsim.wire.envelope import decode_own, encode
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
    """32 hexadecimal digits of one seeded round with one client of 32 examples: forward, backward, optimiser,
    curvature where the algorithm uses it, the fold, and an evaluation.

    Call workers.numerics.fix_numerics before. An algorithm that cannot work on so few examples counts by the
    kind of its error, and the evaluation of the start model by its bits.
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
