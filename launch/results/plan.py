"""fedsim plan: what an experiment would cost on the wire, from its schedule and its messages' sizes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.markup import escape

from fedsim.asynchrony import AsyncSchedule
from fedsim.data.partitions import partition
from fedsim.edge_links import Hops
from fedsim.experiment import Experiment, build_algorithm
from fedsim.participation import Schedule
from fedsim.problem import Problem
from fedsim.tree import Tree
from fedsim.wire.wire_size import RUN_NAME, EnvelopeSize, envelope_size
from launch.configuration.execution import Execution
from launch.configuration.presets import step_remark
from launch.configuration.target_accuracy import percent
from launch.results.planned_devices import DevicePlan, sentence
from launch.runs.client_costs import ClientCosts, sent_once
from launch.session.display import Display, population
from launch.terminal import print_json
from protocols import find
from workers.coordinator.edge_sums import sums_size

Ids = npt.NDArray[np.int64]

PLANNED = ("algo", "model", "dataset", "clients", "rounds", "participation", "seed")
"""Return the first line about an experiment."""


@dataclass
class Plan:
    """Bytes of the algorithm by (direction, field, layer), in all and by round; in how many rounds each
    client gets a broadcast. exact: no size depends on values. costs: one client's share of them, in which
    a message's optional group counts once. devices: simulated seconds and energy, if there is a clock."""

    params: int
    exact: bool = True
    bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    rounds: dict[int, dict[str, int]] = field(default_factory=dict)
    edges: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """The same as `bytes`, between edge servers and the root."""
    costs: ClientCosts = field(default_factory=ClientCosts)
    took_part: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    devices: dict[str, Any] | None = None

    def add(self, round: int, exchange: int, direction: str, size: EnvelopeSize, envelopes: int) -> None:
        """Add a number of envelopes of one size."""
        if not envelopes:
            return
        self.exact = self.exact and size.exact
        for (name, layer), n in size.rows.items():
            self.bytes[direction, name, layer] += n * envelopes
            if not round:
                self.costs.once[direction] += n * envelopes
            elif (exchange, direction, name) not in self.costs.optional:
                self.costs.rounds[direction] += n * envelopes
        sides = self.rounds.setdefault(round, {"down": 0, "up": 0})
        sides[direction] += size.total * envelopes

    def add_edges(self, direction: str, size: EnvelopeSize, envelopes: int) -> None:
        """Add a number of envelopes of one size between edge servers and the root."""
        for (name, layer), n in size.rows.items() if envelopes else ():
            self.edges[direction, name, layer] += n * envelopes

    def total(self, direction: str) -> int:
        return sum(n for (side, _, _), n in self.bytes.items() if side == direction)

    def nested(self) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
        """{kind: {direction: {field: {layer: bytes}}}}, as summary.json has it."""
        out: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
        for kind, counts in (("algorithm", self.bytes), ("edge", self.edges)):
            for (direction, name, layer), n in sorted(counts.items()):
                out.setdefault(kind, {}).setdefault(direction, {}).setdefault(name, {})[layer] = n
        return out


def plan(
    problem: Problem,
    participations: Schedule,
    run: str = RUN_NAME,
    examples: tuple[int, ...] = (),
    steps: AsyncSchedule | None = None,
) -> Plan:
    """The algorithm's traffic of all rounds, and what devices spend on it.

    Args:
        problem: The problem, or an outline of it.
        participations: Its schedule.
        run: The run's name, whose length every header has.
        examples: N_k of all clients, where an outline does not know them.
        steps: The steps of an asynchronous experiment.
    """
    federated = not problem.algorithm.centralised  # else nothing counts as the algorithm's
    everyone, costs = len(problem.clients), ClientCosts(sent_once(problem.algorithm))
    created = Plan(problem.net.layout.size, costs=costs, took_part=np.zeros(everyone, dtype=np.int64))
    edges = _EdgePlan(problem, problem.tree, run) if problem.tree else None
    exchanges = range(1, len(problem.algorithm.exchanges) + 1)
    sizes = {e: _sizes(problem, 1, e, run) for e in exchanges}
    devices = _devices(problem, examples, sizes, edges)
    for e in range(1, len(problem.algorithm.setup) + 1):
        messages = _sizes(problem, 0, e, run)
        for direction, size in messages.items():
            created.add(0, e, direction, size, everyone * federated)
        if edges:
            edges.add(created, 0, e, np.arange(everyone), np.arange(everyone))
        if devices:
            devices.set_up(e, messages["down"].total, messages["up"].total)
    for number, side, name in costs.optional:
        parts = (n for (field, _), n in sizes[number][side].rows.items() if field == name)
        costs.once[side] += everyone * sum(parts)
    last: tuple[int, ...] | None = None
    ids = np.zeros(0, dtype=np.int64)
    for r in range(1, problem.experiment.rounds + 1):
        participation = participations(r)
        if participation.participants is not last:  # a full client population is the same tuple every round
            last, ids = participation.participants, np.array(participation.participants, dtype=np.int64)
        created.took_part[ids] += 1
        created.rounds.setdefault(r, {"down": 0, "up": 0})
        participants, gone = (
            federated * len(p) for p in (participation.participants, participation.dropouts)
        )
        for e in exchanges:
            created.add(r, e, "down", sizes[e]["down"], participants if e == 1 else participants - gone)
            created.add(r, e, "up", sizes[e]["up"], participants - gone)
            if edges and participants:
                there = _without(ids, participation.dropouts)
                sent = _without(there, participation.lost_uploads)
                edges.add(created, r, e, ids if e == 1 else there, sent)
        if devices:
            took = np.array(steps.seconds_of(r, participation.participants)) if steps else None
            step = (steps.step(r).seconds, took) if steps and took is not None else None
            devices.add(r, ids, participation.dropouts, step, participation.lost_uploads)
    if devices:
        created.devices = devices.totals(problem.experiment.rounds)
    return created


def _devices(
    problem: Problem,
    examples: tuple[int, ...],
    sizes: dict[int, dict[str, EnvelopeSize]],
    edges: _EdgePlan | None,
) -> DevicePlan | None:
    """The plan of the clients' devices, if there is a virtual clock."""
    if problem.clock is None:
        return None
    totals = {e: (of["down"].total, of["up"].total) for e, of in sizes.items()}
    return DevicePlan(problem.clock, examples or problem.sizes, totals, edges.hops if edges else None)


@dataclass
class _EdgePlan:
    """The traffic between edge servers and the root."""

    problem: Problem
    tree: Tree
    run: str

    def add(self, created: Plan, round: int, number: int, received: Ids, sent: Ids) -> None:
        """An exchange, in which these clients get the broadcast, and the uploads of those are folded."""
        down, up = _sizes(self.problem, round, number, self.run, "relayed").values()
        created.add_edges("down", down, len(self.tree.active(received)))
        if not (round and self.tree.merges):
            created.add_edges("up", up, len(sent))
            return
        uploads = np.bincount(self.tree.owners[sent])
        for count, edges in zip(*np.unique(uploads[uploads > 0], return_counts=True), strict=True):
            size = sums_size(self.problem, round, number, int(count), self.run)
            created.add_edges("up", size, int(edges))

    def hops(self, round: int, number: int, received: Ids, sent: Ids) -> Hops:
        """The bytes of every edge server in such an exchange."""
        down, up = _sizes(self.problem, round, number, self.run, "relayed").values()
        each = len(self.tree.names)
        asked, uploads = (np.bincount(self.tree.owners[ids], minlength=each) for ids in (received, sent))
        if round and self.tree.merges:
            counts, at = np.unique(uploads, return_inverse=True)
            sizes = [sums_size(self.problem, round, number, int(n), self.run).total for n in counts]
            return Hops((asked > 0) * down.total, np.where(uploads > 0, np.array(sizes)[at], 0))
        return Hops((asked > 0) * down.total, uploads * up.total)


def _without(ids: Ids, others: AbstractSet[int]) -> Ids:
    return ids[~np.isin(ids, np.fromiter(others, dtype=np.int64))] if others else ids


def _sizes(
    problem: Problem, round: int, number: int, run: str, down: str = "task"
) -> dict[str, EnvelopeSize]:
    """By direction, the sizes of an exchange's envelopes; down: the kind of the one that goes down."""
    types = problem.exchange(round, number)
    return {
        side: envelope_size(
            kind,
            problem.codecs[side],
            problem.dims,
            problem.net.layout,
            kind=name,
            run=run,
            stored=problem.stored_dtype,
        )
        for side, kind, name in (("down", types.down, down), ("up", types.up, "upload"))
    }


def planned(experiment: Experiment, execution: Execution) -> tuple[Problem, Plan]:
    """Build the problem, and add up what its messages cost.

    Raises:
        FedsimError: as launch.
    """
    algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
    problem = Problem.outline(experiment, algorithm, Path(execution.data_dir) if execution.data_dir else None)
    created, dataset = problem.experiment, problem.dataset
    timed = problem.clock is not None
    sizes = (1,) * len(problem.clients) if timed else ()
    divisible = created.clients <= len(dataset.train_targets)  # else every client on the clock has one
    if created.participation.startswith("size:") or (timed and divisible):
        split = partition(
            created.partition,
            targets=dataset.train_targets,
            classes=dataset.classes,
            clients=created.clients,
            seed=created.seed,
            fraction=created.fraction,
            centres=dataset.centres,
        )
        sizes = tuple(len(rows) for rows in split)
    asynchrony = problem.asynchrony_of(sizes)
    participations = problem.schedule(sizes, asynchrony)
    return problem, plan(problem, participations, examples=sizes, steps=asynchrony.schedule)


def to_json(problem: Problem, created: Plan) -> dict[str, Any]:
    """The same for --json. `bytes` is nested as in summary.json; the rest are the numbers of the tables."""
    e, times = problem.experiment, created.took_part
    per_round = [sides["down"] + sides["up"] for r, sides in created.rounds.items() if r]
    return {
        **{key: getattr(e, key) for key in PLANNED},
        "until": e.until or None,
        "params": created.params,
        "exact": created.exact,
        **_as_summary(created),
        "rounds_per_client": {"min": times.min(), "max": times.max(), "mean": times.mean()},
        "bytes_per_round": {"min": min(per_round, default=0), "max": max(per_round, default=0)},
        **({"devices": created.devices} if created.devices else {}),
    }


def print_bill(experiment: Experiment, execution: Execution, as_json: bool = False) -> None:
    """Print the bill of a run without running it."""
    problem, created = planned(experiment, execution)
    if as_json:
        return print_json(to_json(problem, created))
    e = problem.experiment
    display = Display(e.rounds)
    display.note(
        f"[bold]{e.algo}[/], {e.model} on {e.dataset}, P = {created.params:,}; {population(problem)}, "
        f"{e.rounds:,} rounds, participation {e.participation}, seed {e.seed}"
    )
    if codecs := [
        f"{side}.{field}={name}" for side, by in problem.codecs.items() for field, name in by.items()
    ]:
        display.note("codecs: " + ", ".join(codecs))
    display.traffic(_as_summary(created))
    times = created.took_part
    display.note(
        f"a client takes part in {times.min():,} to {times.max():,} rounds, {times.mean():,.1f} on average; "
        f"a round costs {_range([s['down'] + s['up'] for r, s in created.rounds.items() if r])} bytes"
    )
    if line := step_remark(experiment):
        display.note(escape(line))
    if created.devices:
        display.note(sentence(created.devices))
    if not created.exact:
        display.note(
            "at most: a codec's size depends on the values, or a message has parts that may be absent"
        )
    if e.until:
        display.note(f"at most: the run ends with the first evaluated round of {percent(e.until)}")
    return None


def _as_summary(created: Plan) -> dict[str, Any]:
    down, up = created.total("down"), created.total("up")
    times = created.took_part
    units = created.costs.units(params=created.params, participations=int(times.sum()), clients=len(times))
    return {
        "bytes": {"algorithm": {}, **created.nested()},
        "bytes_down": down,
        "bytes_up": up,
        **units,
    }


def _range(numbers: list[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
