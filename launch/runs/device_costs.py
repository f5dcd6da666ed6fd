"""The clients' time and energy on the virtual clock, for summary.json and `fedsim plan`.

They depend only on the configuration and the rows of ledger.csv, not on the numbers of workers and resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedsim.asynchrony import AsyncSchedule
from fedsim.problem import Problem
from fedsim.tree import Tree
from fedsim.virtual_clock import Clock, Hops, Ints, indices
from fedsim.wire.ledger_rows import Entry

Sent = dict[tuple[int, int], dict[int, list[int]]]
"""The bytes down and up of every client, by round and exchange."""


class DeviceCosts:
    """The clients' time and energy, added up exchange by exchange."""

    def __init__(self, clock: Clock, sizes: Ints, steps: AsyncSchedule | None) -> None:
        """Start without exchanges. sizes: N_k of all clients. steps: the schedule of an asynchronous run."""
        self._clock, self._sizes, self._steps = clock, sizes, steps
        self._seconds, self._joules, self._waits, self._holds = (np.zeros(len(sizes)) for _ in range(4))
        self._simulated = 0.0

    def add(self, round: int, exchange: int, clients: Ints, down: Ints, up: Ints, hops: Hops | None) -> None:
        """Add an exchange. clients: those that got the broadcast, ascending. down, up: the bytes of each;
        up = 0 for a client that only downloads. hops: bytes between edge servers and the root, if any."""
        answered, sizes = up > 0, self._sizes[clients]
        there, own, took = clients[answered], sizes[answered], self._clock.download_of(clients, down)
        step = self._steps.step(round) if self._steps is not None and round else None
        if step is not None and self._steps is not None:
            took[answered] = self._steps.seconds_of(round, tuple(there.tolist()))
            lasts = step.seconds
        else:
            took[answered] = self._clock.seconds_of(round, there, own, down[answered], up[answered], exchange)
            lasts = self._clock.duration(clients, (took, answered), (down, up), hops)
        self._seconds[clients] += took
        self._joules[clients] += self._clock.joules_of(clients, sizes * answered, down, up)
        self._simulated += lasts
        if step is not None:
            self._waits[list(step.participants)] += step.waits
            return
        until = np.minimum(took[answered], lasts)
        self._waits[there] += lasts - until
        if len(until) > 1:
            second, last = np.argpartition(until, -2)[-2:]
            self._holds[there[last]] += until[last] - until[second]

    def totals(self) -> dict[str, Any]:
        """Return the value of `devices` in summary.json.

        It has `simulated_seconds` of all rounds, these lists with a number per client, and the sum NAME_total
        of each list:

        - client_seconds: The seconds of downloads, computation and uploads.
        - client_joules: The energy, only if it is known for the devices.
        - client_waits: The seconds from an answer to the end of its exchange; in an asynchronous run, the
          seconds that an upload waits in the buffer.
        - client_holds: The seconds in which only this client has not answered; only in a synchronous run.
        """
        lists = {"client_seconds": self._seconds, "client_waits": self._waits}
        lists |= {"client_holds": self._holds} if self._steps is None else {}
        lists |= {"client_joules": self._joules} if self._clock.devices.has_energy else {}
        result: dict[str, Any] = {"simulated_seconds": self._simulated}
        for name, values in lists.items():
            result |= {name: values.tolist(), f"{name}_total": math.fsum(values.tolist())}
        return result


def device_costs(problem: Problem, rows: Iterable[Entry], rounds: int) -> dict[str, Any]:
    """Return DeviceCosts.totals from the ledger's rows up to the last committed round. The problem must have
    a clock."""
    assert problem.rounds.clock is not None
    costs = DeviceCosts(problem.rounds.clock, indices(problem.sizes), problem.rounds.policy.schedule)
    all_sent, hops = _sent(rows, rounds, problem.rounds.tree)
    for (round, exchange), sent in sorted(all_sent.items()):
        down, up = (indices([sent[k][side] for k in sorted(sent)]) for side in (0, 1))
        costs.add(round, exchange, indices(sorted(sent)), down, up, hops.get((round, exchange)))
    return costs.totals()


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
