"""fedsim plan: an experiment's cost on the wire, from its schedule and the sizes of its messages alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.text import Text

from fedsim.asynchrony import AsyncSchedule
from fedsim.client_devices import Floats
from fedsim.data.partitions import partition
from fedsim.experiment import Experiment, build_algorithm
from fedsim.participation import Schedule
from fedsim.problem import Problem
from fedsim.tree import Tree
from fedsim.virtual_clock import Clock, Hops, Ints, indices
from fedsim.wire.wire_size import RUN_NAME, EnvelopeSize, envelope_size, without_fields
from launch.configuration.execution import Execution
from launch.configuration.presets import step_remark
from launch.configuration.target_accuracy import percent
from launch.results.tables import extent
from launch.runs.client_costs import ClientCosts, sent_once
from launch.session.display import Display, population
from launch.terminal import print_json
from protocols import find
from workers.coordinator.edge_sums import sums_size

Ids = npt.NDArray[np.int64]

PLANNED = ("algo", "model", "dataset", "clients", "rounds", "participation", "seed")
"""Keys of an experiment that `to_json` includes."""


@dataclass
class Plan:
    """The planned bytes of the algorithm, by (direction, field, layer) and by round. exact: whether no size
    depends on values. costs: the bytes per client and round and once per client. took_part: by client, the
    number of rounds with a broadcast. devices: simulated seconds and energy; None without a clock."""

    params: int
    exact: bool = True
    bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    rounds: dict[int, dict[str, int]] = field(default_factory=dict)
    edges: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Bytes between edge servers and the root, by the keys of `bytes`."""
    costs: ClientCosts = field(default_factory=ClientCosts)
    answered: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The number of rounds in which each client answers."""
    took_part: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    devices: dict[str, Any] | None = None
    least: dict[str, int] = field(default_factory=dict)
    """With +event or +quiet, the minimum by direction: nothing changes after each client's first message."""

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
        """Return {kind: {direction: {field: {layer: bytes}}}}, as in summary.json."""
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
    """Return the algorithm's traffic of all rounds, and the devices' seconds and energy.

    problem: may be a Problem.outline. run: the run's name, which is in every header. examples: N_k of all
    clients; needed if an outline does not know them. steps: the schedule of an asynchronous experiment.
    """
    federated = not problem.algorithm.centralised  # the algorithm of centralised training sends nothing
    everyone, costs = len(problem.clients), ClientCosts(sent_once(problem.algorithm))
    nobody = np.zeros(everyone, dtype=np.int64)
    created = Plan(problem.net.layout.size, costs=costs, took_part=nobody, answered=nobody.copy())
    edges = _EdgePlan(problem, problem.tree, run) if problem.tree else None
    exchanges = range(1, len(problem.algorithm.exchanges) + 1)
    sizes = {e: _sizes(problem, 1, e, run) for e in exchanges}
    devices = None
    if problem.clock is not None:
        totals = {e: (of["down"].total, of["up"].total) for e, of in sizes.items()}
        devices = DevicePlan(problem.clock, examples or problem.sizes, totals, edges.hops if edges else None)
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
        if participation.participants is not last:  # with all clients, each round has the same tuple object
            last, ids = participation.participants, np.array(participation.participants, dtype=np.int64)
        created.took_part[ids] += 1
        created.answered[_without(ids, participation.dropouts)] += 1
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
    if problem.trigger is not None:
        created.least = _least(problem, created, sizes[1], run)
    if problem.trigger is not None or problem.compressed is not None:  # sizes depend on values
        created.exact = False
        if created.devices is not None:
            created.devices["at_most"] = True
    return created


def _least(problem: Problem, created: Plan, sizes: Mapping[str, EnvelopeSize], run: str) -> dict[str, int]:
    """Return Plan.least, without directions in which a codec's size depends on the values."""
    assert problem.trigger is not None
    rules, least = {"down": problem.trigger.down, "up": problem.trigger.up}, dict[str, int]()
    there = {"down": created.took_part, "up": created.answered}
    for (side, rule), kind in zip(rules.items(), ("task", "upload"), strict=True):
        setup = (_sizes(problem, 0, e, run)[side] for e in range(1, len(problem.algorithm.setup) + 1))
        if not all(size.exact for size in (sizes[side], *setup)):
            continue
        envelopes, first = int(there[side].sum()), int((there[side] > 0).sum())
        saved = (envelopes - first) * (sizes[side].total - without_fields(kind, run))
        least[side] = created.total(side) - (saved if rule is not None else 0)
    return least


@dataclass
class _EdgePlan:
    """The traffic between edge servers and the root."""

    problem: Problem
    tree: Tree
    run: str

    def add(self, created: Plan, round: int, number: int, received: Ids, sent: Ids) -> None:
        """Add an exchange. received: clients that get the broadcast. sent: clients with a folded upload."""
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
        """Return the bytes of every edge server in an exchange. received, sent: as for `add`."""
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
    """Return the sizes of an exchange's envelopes by direction. down: the kind of the downward envelope."""
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
    """Build the problem, and add up the sizes of its messages."""
    algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
    problem = Problem.outline(experiment, algorithm, Path(execution.data_dir) if execution.data_dir else None)
    created, dataset = problem.experiment, problem.dataset
    timed = problem.clock is not None
    sizes = (1,) * len(problem.clients) if timed else ()
    divisible = created.clients <= len(dataset.train_targets)  # otherwise, N_k = 1 on the clock
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
    """Return the plan for --json: `bytes` is nested as in summary.json; the rest are the printed numbers."""
    e, times = problem.experiment, created.took_part
    per_round = [sides["down"] + sides["up"] for r, sides in created.rounds.items() if r]
    return {
        **{key: getattr(e, key) for key in PLANNED},
        "until": e.until or None,
        "params": created.params,
        "exact": created.exact,
        **({"least": created.least} if created.least else {}),
        **_as_summary(created),
        "rounds_per_client": {"min": times.min(), "max": times.max(), "mean": times.mean()},
        "bytes_per_round": {"min": min(per_round, default=0), "max": max(per_round, default=0)},
        **({"devices": created.devices} if created.devices else {}),
    }


def print_bill(experiment: Experiment, execution: Execution, as_json: bool = False) -> None:
    problem, created = planned(experiment, execution)
    if as_json:
        return print_json(to_json(problem, created))
    e = problem.experiment
    display = Display(e.rounds)
    display.note(
        Text.assemble(
            (e.algo, "bold"),
            f", {e.model} on {e.dataset}, P = {created.params:,}; {population(problem)}, "
            f"{e.rounds:,} rounds, participation {e.participation}, seed {e.seed}",
        )
    )
    if codecs := [
        f"{side}.{field}={name}" for side, by in problem.codecs.items() for field, name in by.items()
    ]:
        display.note("codecs: " + ", ".join(codecs))
    display.traffic(_as_summary(created))
    times, spent = created.took_part, [s["down"] + s["up"] for r, s in created.rounds.items() if r]
    display.note(
        f"a client takes part in {extent((int(times.min()), int(times.max())))} rounds, "
        f"{times.mean():,.1f} on average; "
        f"a round costs {extent(spent or [0])} bytes"
    )
    if line := step_remark(experiment):
        display.note(line)
    if created.devices:
        display.note(sentence(created.devices))
    if created.least:
        least = " and ".join(f"{n:,} bytes {side}" for side, n in created.least.items())
        display.note(
            f"at most; at least {least}: if nothing changes after each client's first message (+event, "
            "+quiet)"
        )
    elif not created.exact:
        display.note(
            "at most: a codec's size depends on the values, or a message has parts that may be absent; "
            "a run with --rounds 3 measures it"
        )
    if e.until:
        display.note(f"at most: the run ends with the first evaluated round of {percent(e.until)}")
    return None


def _as_summary(created: Plan) -> dict[str, Any]:
    down, up = created.total("down"), created.total("up")
    times = created.took_part
    units = created.costs.units(params=created.params, participations=int(times.sum()), clients=len(times))
    return {"bytes": {"algorithm": {}, **created.nested()}, "bytes_down": down, "bytes_up": up, **units}


DRAWN = 300_000
"""After so many tasks, noise and jitter are not drawn; the durations of later rounds are estimated."""


class DevicePlan:
    """The simulated seconds and energy of a plan, added up round by round.

    estimated: whether some rounds have the mean duration of earlier rounds. If so, the seconds in which
    clients are busy are expectations, too.
    """

    def __init__(
        self,
        clock: Clock,
        sizes: tuple[int, ...],
        exchanges: Mapping[int, tuple[int, int]],
        hops: Callable[[int, int, Ints, Ints], Hops] | None = None,
    ) -> None:
        """Start without rounds. sizes: N_k of all clients. exchanges: by exchange, the stream bytes of a
        broadcast and of an upload. hops: with a tree, a function of round, exchange, clients with a broadcast
        and clients with a folded upload; it returns the bytes of the edge servers."""
        self._clock, self._sizes, self._exchanges = clock, indices(sizes), exchanges
        self._hops = hops
        everyone = np.arange(len(sizes))
        self._draws = clock.has_draws(everyone)
        self._gone, self._took_part = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
        self._drawn = np.zeros(len(sizes), np.int64)
        """By client, the number of answered rounds whose seconds were drawn."""
        self._seconds, self._joules = np.zeros(len(sizes)), np.zeros(len(sizes))
        self._durations: list[float] = []
        self._last: tuple[Ints, float] = (indices(()), 0.0)
        self._tasks = 0
        self.setup_seconds = 0.0
        self.estimated = False

    def set_up(self, exchange: int, bytes_down: int, bytes_up: int) -> None:
        """Add an exchange of the set-up, in which all clients take part."""
        everyone, once = np.arange(len(self._sizes)), np.ones(len(self._sizes), np.int64)
        self._add(bytes_down, bytes_up, once, np.zeros_like(once), once if self._draws else 0 * once)
        of_everyone = everyone, np.ones(len(everyone), dtype=np.bool_), everyone
        self.setup_seconds += self._duration(0, exchange, *of_everyone, bytes_down, bytes_up)

    def add(
        self,
        round: int,
        clients: Ints,
        dropouts: Collection[int],
        step: tuple[float, Floats] | None = None,
        lost: Collection[int] = (),
    ) -> None:
        """Add a round.

        clients: the clients that get the broadcast. If they are those of the previous round, passing the same
        object saves time. dropouts: the clients that send nothing. step: the round's duration and each
        client's seconds, from an asynchronous schedule. lost: the clients whose uploads do not arrive.
        """
        self._took_part[clients] += 1
        gone = indices(sorted(dropouts))
        self._gone[gone] += 1
        if step is not None:
            lasts, took = step
            answered = ~np.isin(clients, gone)
            self._durations.append(lasts)
            self._seconds[clients[answered]] += took[answered]
            self._drawn[clients[answered]] += 1
        elif not self._draws and not dropouts and not lost and clients is self._last[0]:
            self._durations.append(self._last[1])
        elif self._draws and self._tasks >= DRAWN:
            self.estimated = True
        else:
            answering = np.setdiff1d(clients, gone, assume_unique=True) if dropouts else clients
            folded = answering[~np.isin(answering, indices(sorted(lost)))] if lost else answering
            answers = ~np.isin(clients, gone) if dropouts else np.ones(len(clients), dtype=np.bool_)
            lasts = sum(
                self._duration(round, e, asked, there, folded, down, up)
                for e, (down, up) in self._exchanges.items()
                for asked, there in [(clients, answers) if e == 1 else (answering, answers[answers])]
            )
            self._durations.append(lasts)
            if not dropouts and not lost:
                self._last = clients, lasts
            if self._draws:
                self._drawn[answering] += 1
            self._tasks += len(clients)

    def totals(self, rounds: int) -> dict[str, Any]:
        """Return the value of `devices` for a plan of this many rounds."""
        answered = self._took_part - self._gone
        for e, (down, up) in self._exchanges.items():
            self._add(down, up, answered, self._gone if e == 1 else np.zeros_like(answered), self._drawn)
        mean = math.fsum(self._durations) / max(len(self._durations), 1)
        left = rounds - len(self._durations)
        energy = {**_spread("client_joules", self._joules)} if self._clock.devices.has_energy else {}
        return {
            "simulated_seconds": self.setup_seconds + math.fsum(self._durations) + left * mean,
            "estimated": self.estimated,
            **_spread("client_seconds", self._seconds),
            **energy,
        }

    def _add(self, down: int, up: int, answered: Ints, gone: Ints, drawn: Ints) -> None:
        """Add an exchange. answered, gone: the number of answers and of missing answers of each client.
        drawn: the number of answers of each client whose seconds are already included."""
        everyone, clock = np.arange(len(self._sizes)), self._clock
        self._seconds += (answered - drawn) * clock.mean_seconds_of(everyone, self._sizes, down, up)
        self._seconds += gone * clock.download_of(everyone, down)
        self._joules += answered * clock.joules_of(everyone, self._sizes, down, up)
        self._joules += gone * clock.joules_of(everyone, np.zeros_like(self._sizes), down, 0)

    def _duration(
        self,
        round: int,
        exchange: int,
        asked: Ints,
        answered: npt.NDArray[np.bool_],
        folded: Ints,
        down: int,
        up: int,
    ) -> float:
        took, there = np.zeros(len(asked)), asked[answered]
        took[answered] = self._clock.seconds_of(round, there, self._sizes[there], down, up, exchange)
        if self._draws:
            self._seconds[there] += took[answered]
        sent = np.full(len(asked), down), answered * up
        if self._clock.deadline < math.inf:
            folded = folded[np.isin(folded, asked[answered & (took <= self._clock.deadline)])]
        hops = self._hops(round, exchange, asked, folded) if self._hops else None
        return self._clock.duration(asked, (took, answered), sent, hops)


def _spread(name: str, values: Floats) -> dict[str, Any]:
    spread = {"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean())}
    return {name: spread, f"{name}_total": math.fsum(values.tolist())}


def sentence(devices: Mapping[str, Any]) -> str:
    prefix = "at most " if devices.get("at_most") else "about " if devices["estimated"] else ""
    text = f"virtual clock: {prefix}{devices['simulated_seconds']:,.1f} s; a client is busy for "
    text += _busy(devices["client_seconds"], "s", devices["client_seconds_total"])
    if "client_joules" in devices:
        text += "; it spends " + _busy(devices["client_joules"], "J", devices["client_joules_total"])
    return text


def _busy(spread: Mapping[str, float], unit: str, total: float) -> str:
    return (
        f"{spread['min']:,.4g} to {spread['max']:,.4g} {unit}, {spread['mean']:,.4g} on average, "
        f"{total:,.4g} {unit} in all"
    )
