"""The clients' time and energy on the virtual clock, for summary.json.

They depend only on the configuration and the rows of ledger.csv, not on the numbers of workers and resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.client_devices import Floats
from fedsim.problem import Problem
from fedsim.tree import Tree
from fedsim.virtual_clock import Clock, Hops, Ints, indices
from fedsim.wire.ledger_rows import Entry

Sent = dict[tuple[int, int], dict[int, list[int]]]
"""The bytes down and up of every client, by round and exchange."""


def device_costs(problem: Problem, rows: Iterable[Entry], rounds: int) -> dict[str, Any]:
    """Return the value of `devices` in summary.json, from the ledger's rows up to the last committed round.

    The problem must have a clock. The value has `simulated_seconds` of all rounds, these lists with a number
    per client, and the sum NAME_total of each list:

    - client_seconds: The seconds of downloads, computation and uploads.
    - client_joules: The energy, only if it is known for the devices.
    - client_waits: The seconds from an answer to the end of its exchange; in an asynchronous run, the seconds
      that an upload waits in the buffer.
    - client_holds: The seconds in which only this client has not answered; only in a synchronous run.
    """
    clock, sizes, steps = problem.clock, indices(problem.sizes), problem.asynchrony.schedule
    assert clock is not None
    seconds, joules, waits, holds = (np.zeros(len(sizes)) for _ in range(4))
    simulated = 0.0
    all_sent, hops = _sent(rows, rounds, problem.tree)
    for (round, exchange), sent in sorted(all_sent.items()):
        clients = indices(sorted(sent))
        down, up = (indices([sent[k][side] for k in sorted(sent)]) for side in (0, 1))
        took = _seconds(problem, clock, (round, exchange), clients, sizes[clients], down, up)
        seconds[clients] += took
        joules[clients] += clock.joules_of(clients, sizes[clients] * (up > 0), down, up)
        answers, hop = (took, up > 0), hops.get((round, exchange))
        lasts = _duration(problem, clock, round, clients, answers, (down, up), hop)
        simulated += lasts
        there, own = clients[up > 0], np.minimum(took[up > 0], lasts)
        if steps is not None and round:
            step = steps.step(round)
            waits[list(step.participants)] += step.waits
            continue
        waits[there] += lasts - own
        if len(own) > 1:
            second, last = np.argsort(own, kind="stable")[-2:]
            holds[there[last]] += own[last] - own[second]
    costs = {"simulated_seconds": simulated, **_with_total("client_seconds", seconds)}
    costs |= _with_total("client_waits", waits)
    if steps is None:
        costs |= _with_total("client_holds", holds)
    return {"devices": costs | (_with_total("client_joules", joules) if clock.devices.has_energy else {})}


def _with_total(name: str, values: Floats) -> dict[str, Any]:
    return {name: values.tolist(), f"{name}_total": math.fsum(values.tolist())}


def _sent(rows: Iterable[Entry], rounds: int, tree: Tree | None) -> tuple[Sent, dict[tuple[int, int], Hops]]:
    """Return the algorithm's bytes in committed rounds, and those between edge servers and root, if any."""
    sent: Sent = {}
    hops: dict[tuple[int, int], Hops] = {}
    numbers = {name: e for e, name in enumerate(tree.names)} if tree else {}
    for row in rows:
        if tree is not None and row.kind == "edge" and row.round <= rounds:
            if (row.round, row.exchange) not in hops:
                hops[row.round, row.exchange] = Hops.none(tree)
            hops[row.round, row.exchange].add(numbers[row.hop], row.direction, row.bytes)
        if row.kind == "algorithm" and row.round <= rounds:
            of_client = sent.setdefault((row.round, row.exchange), {}).setdefault(row.client, [0, 0])
            of_client[row.direction == "up"] += row.bytes
    return sent, hops


def _seconds(
    problem: Problem, clock: Clock, of: tuple[int, int], clients: Ints, sizes: Ints, down: Ints, up: Ints
) -> Floats:
    """Return each client's seconds in the exchange `of` (round, number). Some clients only download."""
    round, exchange = of
    result = clock.download_of(clients, down)
    answered, steps = np.flatnonzero(up), problem.asynchrony.schedule
    if steps is not None and round:
        result[answered] = steps.seconds_of(round, tuple(clients[answered].tolist()))
    else:
        k, own = clients[answered], sizes[answered]
        result[answered] = clock.seconds_of(round, k, own, down[answered], up[answered], exchange)
    return result


def _duration(
    problem: Problem,
    clock: Clock,
    round: int,
    clients: Ints,
    answers: tuple[Floats, npt.NDArray[np.bool_]],
    sent: tuple[Ints, Ints],
    hops: Hops | None,
) -> float:
    """Return the duration of an exchange in seconds, as in fedsim.virtual_clock.ExchangeClock."""
    steps = problem.asynchrony.schedule
    if steps is not None and round:
        return steps.step(round).seconds
    return clock.duration(clients, answers, sent, hops)
