"""fedsim plan: an experiment's cost on the wire, from its schedule and the sizes of its messages alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from fedsim.asynchrony import AsyncSchedule
from fedsim.client_devices import Floats
from fedsim.data.partitions import partition
from fedsim.experiment import Experiment, build_algorithm
from fedsim.participation import Participation, Schedule
from fedsim.problem import Problem
from fedsim.tree import Tree, sums_dims, sums_message
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

PLANNED = ("algo", "model", "dataset", "clients", "rounds", "participation", "seed")
"""Keys of an experiment that `to_json` includes."""
DRAWN = 300_000
"""After so many tasks, noise and jitter are not drawn; the durations of later rounds are estimated."""


@dataclass
class Plan:
    """The planned bytes of the algorithm, by (direction, field, layer) and by round. exact: whether no size
    depends on values. costs: the bytes per client and round and once per client. took_part, answered: by
    client, the number of rounds with a broadcast and with an answer. devices: simulated seconds and energy;
    None without a clock."""

    params: int
    took_part: Ints
    answered: Ints
    costs: ClientCosts
    exact: bool = True
    bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    edges: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Bytes between edge servers and the root, by the keys of `bytes`."""
    rounds: dict[int, dict[str, int]] = field(default_factory=dict)
    devices: dict[str, Any] | None = None
    least: dict[str, int] = field(default_factory=dict)
    """With +event or +quiet, the minimum by direction: nothing changes after each client's first message."""

    def add(self, round: int, exchange: int, direction: str, size: EnvelopeSize, envelopes: int) -> None:
        """Add a number of envelopes of one size."""
        sides = self.rounds.setdefault(round, {"down": 0, "up": 0})
        if not envelopes:
            return
        self.exact = self.exact and size.exact
        for (name, layer), n in size.rows.items():
            self.bytes[direction, name, layer] += n * envelopes
            if not round:
                self.costs.once[direction] += n * envelopes
            elif (exchange, direction, name) not in self.costs.optional:
                self.costs.rounds[direction] += n * envelopes
        sides[direction] += size.total * envelopes

    def total(self, direction: str) -> int:
        return sum(n for (side, _, _), n in self.bytes.items() if side == direction)

    def nested(self) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
        """Return {kind: {direction: {field: {layer: bytes}}}}, as in summary.json."""
        out: dict[str, dict[str, dict[str, dict[str, int]]]] = {"algorithm": {}}
        for kind, counts in (("algorithm", self.bytes), ("edge", self.edges)):
            for (direction, name, layer), n in sorted(counts.items()):
                out.setdefault(kind, {}).setdefault(direction, {}).setdefault(name, {})[layer] = n
        return out


@dataclass(frozen=True, eq=False)
class _Clients:
    """The clients of a round: those that get the broadcast, those that answer it, and those whose uploads
    are folded."""

    asked: Ints
    answering: Ints
    folded: Ints

    @classmethod
    def of(cls, p: Participation) -> _Clients:
        """Return the clients of a round's schedule."""
        asked = indices(p.participants)
        answering = _without(asked, p.dropouts)
        return cls(asked, answering, _without(answering, p.lost_uploads))

    def of_exchange(self, number: int) -> Ints:
        """Return the clients that get the broadcast of an exchange: after the first, those that answered."""
        return self.asked if number == 1 else self.answering


def _without(ids: Ints, others: AbstractSet[int]) -> Ints:
    return ids[~np.isin(ids, np.fromiter(others, dtype=np.int64))] if others else ids


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
    count, federated = len(problem.clients), not problem.algorithm.centralised  # otherwise nothing is sent
    costs, nobody = ClientCosts(sent_once(problem.algorithm)), np.zeros(count, dtype=np.int64)
    created = Plan(problem.net.layout.size, nobody.copy(), nobody.copy(), costs)
    edges = _Edges(problem, problem.tree, run) if problem.tree else None
    devices = _Devices(problem.clock, indices(examples or problem.sizes), edges) if problem.clock else None
    exchanges = {0: len(problem.algorithm.setup), 1: len(problem.algorithm.exchanges)}  # of set-up and round
    sizes = {r: {e: _sizes(problem, r, e, run) for e in range(1, n + 1)} for r, n in exchanges.items()}

    def add(round: int, clients: _Clients, step: tuple[float, Floats] | None = None) -> None:
        """Add a round; round 0 is the set-up."""
        messages = sizes[min(round, 1)]
        for e, of in messages.items():
            asked = federated * len(clients.of_exchange(e))
            created.add(round, e, "down", of["down"], asked)
            created.add(round, e, "up", of["up"], federated * len(clients.answering))
            if edges and asked:
                for side, size, n in edges.sent(round, e, clients.of_exchange(e), clients.folded)[1]:
                    created.edges.update({(side, *part): n * bytes for part, bytes in size.rows.items()})
        if devices and messages:
            totals = {e: (of["down"].total, of["up"].total) for e, of in messages.items()}
            devices.add(round, clients, totals, step)

    everyone = np.arange(count)
    add(0, _Clients(everyone, everyone, everyone))
    for number, side, name in costs.optional:
        rows = sizes[1][number][side].rows
        costs.once[side] += count * sum(n for (field, _), n in rows.items() if field == name)
    before, clients = Participation(()), _Clients.of(Participation(()))
    for r in range(1, problem.experiment.rounds + 1):
        participation = participations(r)
        if participation != before:
            before, clients = participation, _Clients.of(participation)
        created.took_part[clients.asked] += 1
        created.answered[clients.answering] += 1
        if steps is None:
            add(r, clients)
        else:
            took = np.array(steps.seconds_of(r, participation.participants))
            add(r, clients, (steps.step(r).seconds, took))
    created.devices = devices.totals() if devices else None
    if problem.trigger is not None:
        created.least = _least(problem, created, sizes, run)
        created.exact = False  # sizes depend on values
        if created.devices is not None:
            created.devices["at_most"] = True
    return created


def _sizes(
    problem: Problem, round: int, number: int, run: str, down: str = "task"
) -> dict[str, EnvelopeSize]:
    """Return the sizes of an exchange's envelopes by direction. down: the kind of the downward envelope."""
    types, layout = problem.exchange(round, number), problem.net.layout
    return {
        side: envelope_size(
            *(getattr(types, side), problem.codecs[side], problem.dims, layout),
            kind=kind,
            run=run,
            stored=problem.stored_dtype,
        )
        for side, kind in (("down", down), ("up", "upload"))
    }


def _least(
    problem: Problem, created: Plan, sizes: Mapping[int, Mapping[int, Mapping[str, EnvelopeSize]]], run: str
) -> dict[str, int]:
    """Return Plan.least, without directions in which a codec's size depends on the values."""
    assert problem.trigger is not None
    rules, least = {"down": problem.trigger.down, "up": problem.trigger.up}, dict[str, int]()
    there = {"down": created.took_part, "up": created.answered}
    for (side, rule), kind in zip(rules.items(), ("task", "upload"), strict=True):
        if not all(of[side].exact for of in (sizes[1][1], *sizes[0].values())):
            continue
        envelopes, first = int(there[side].sum()), int((there[side] > 0).sum())
        saved = (envelopes - first) * (sizes[1][1][side].total - without_fields(kind, run))
        least[side] = created.total(side) - (saved if rule is not None else 0)
    return least


@dataclass
class _Edges:
    """The traffic between edge servers and the root."""

    problem: Problem
    tree: Tree
    run: str

    def sent(
        self, round: int, number: int, asked: Ints, folded: Ints
    ) -> tuple[Hops, list[tuple[str, EnvelopeSize, int]]]:
        """Return the bytes of every edge server in an exchange, and sizes with their numbers of envelopes.
        asked: clients that get the broadcast. folded: clients with a folded upload."""
        down, up = _sizes(self.problem, round, number, self.run, "relayed").values()
        owned = (self.tree.owners[ids] for ids in (asked, folded))
        heard, uploads = (np.bincount(of, minlength=len(self.tree.names)) for of in owned)
        sizes, hop = [("down", down, int((heard > 0).sum())), ("up", up, len(folded))], uploads * up.total
        if self.tree.sums(round):
            sizes, hop = sizes[:1], np.zeros_like(uploads)
            for count in np.unique(uploads[uploads > 0]).tolist():
                size, merging = self._sums(round, number, count), uploads == count
                sizes.append(("up", size, int(merging.sum())))
                hop[merging] = size.total
        return Hops((heard > 0) * down.total, hop), sizes

    def _sums(self, round: int, number: int, uploads: int) -> EnvelopeSize:
        """Return the size of an edge server's sums of this many uploads."""
        exchange, layout = self.problem.exchange(round, number), self.problem.net.layout
        dims = sums_dims(exchange, self.problem.dims, uploads)
        return envelope_size(sums_message(exchange), {}, dims, layout, kind="sums", run=self.run)


class _Devices:
    """The simulated seconds and the energy of a plan, added up round by round."""

    def __init__(self, clock: Clock, examples: Ints, edges: _Edges | None) -> None:
        """Start without rounds. examples: N_k of all clients."""
        self._clock, self._examples, self._edges = clock, examples, edges
        self._draws = clock.has_draws(np.arange(len(examples)))
        self._seconds, self._joules = np.zeros(len(examples)), np.zeros(len(examples))
        self._setup, self._durations = 0.0, list[float]()
        """Seconds of the set-up and of every other round; NaN for a round that is estimated."""
        self._tasks = 0
        self._last: tuple[_Clients, tuple[float, Floats, Floats]] | None = None

    def add(
        self,
        round: int,
        clients: _Clients,
        exchanges: Mapping[int, tuple[int, int]],
        step: tuple[float, Floats] | None = None,
    ) -> None:
        """Add a round. If nothing is drawn, the same object `clients` as before saves time.

        exchanges: by exchange, the stream bytes of a broadcast and of an upload. step: the duration and the
        clients' seconds, from an asynchronous schedule.
        """
        if self._draws or step or not round or self._last is None or self._last[0] is not clients:
            self._last = clients, self._spent(round, clients, exchanges, step)
        lasts, seconds, joules = self._last[1]
        self._seconds[clients.asked] += seconds
        self._joules[clients.asked] += joules
        if round:
            self._durations.append(lasts)
            self._tasks += len(clients.asked)
        else:
            self._setup += lasts

    def _spent(
        self,
        round: int,
        clients: _Clients,
        exchanges: Mapping[int, tuple[int, int]],
        step: tuple[float, Floats] | None,
    ) -> tuple[float, Floats, Floats]:
        """Return a round's duration, and the seconds and the joules of those that get the broadcast."""
        clock, asked, there = self._clock, clients.asked, clients.answering
        answers, examples = np.isin(asked, there), self._examples[there]
        drawn = not (round and self._draws and self._tasks >= DRAWN)
        lasts, seconds, joules = 0.0 if drawn else math.nan, np.zeros(len(asked)), np.zeros(len(asked))
        for e, (down, up) in exchanges.items():
            gone = asked[~answers] if e == 1 else asked[:0]
            if len(gone):
                seconds[~answers] += clock.download_of(gone, down)
                joules[~answers] += clock.joules_of(gone, np.zeros_like(gone), down, 0)
            joules[answers] += clock.joules_of(there, examples, down, up)
            if step is not None:
                took = step[1][answers]
            elif drawn:
                took = clock.seconds_of(round, there, examples, down, up, e)
                lasts += self._duration(round, e, clients, took, down, up)
            else:
                took = clock.mean_seconds_of(there, examples, down, up)
            seconds[answers] += took
        return lasts if step is None else step[0], seconds, joules

    def _duration(
        self, round: int, number: int, clients: _Clients, took: Floats, down: int, up: int
    ) -> float:
        """Return the seconds of an exchange. took: those of the clients that answer."""
        asked, folded = clients.of_exchange(number), clients.folded
        answers, seconds = np.isin(asked, clients.answering), np.zeros(len(asked))
        seconds[answers] = took
        if self._clock.deadline < math.inf:
            folded = folded[np.isin(folded, clients.answering[took <= self._clock.deadline])]
        hops = self._edges.sent(round, number, asked, folded)[0] if self._edges else None
        return self._clock.duration(
            asked, (seconds, answers), (np.full(len(asked), down), answers * up), hops
        )

    def totals(self) -> dict[str, Any]:
        """Return the plan's `devices`. An estimated round lasts as long as the others do in the mean."""
        known = [seconds for seconds in self._durations if not math.isnan(seconds)]
        mean, left = math.fsum(known) / max(len(known), 1), len(self._durations) - len(known)
        result: dict[str, Any] = {"simulated_seconds": self._setup + math.fsum(known) + left * mean}
        result["estimated"] = left > 0
        energy = {"client_joules": self._joules} if self._clock.devices.has_energy else {}
        for name, values in ({"client_seconds": self._seconds} | energy).items():
            spread = {"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean())}
            result |= {name: spread, f"{name}_total": math.fsum(values.tolist())}
        return result


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
    per_round = [sides["down"] + sides["up"] for r, sides in created.rounds.items() if r] or [0]
    return {
        **{key: getattr(e, key) for key in PLANNED},
        "until": e.until or None,
        "params": created.params,
        "exact": created.exact,
        **({"least": created.least} if created.least else {}),
        "bytes": created.nested(),
        **{f"bytes_{side}": created.total(side) for side in ("down", "up")},
        **created.costs.units(params=created.params, participations=int(times.sum()), clients=len(times)),
        "rounds_per_client": {"min": int(times.min()), "max": int(times.max()), "mean": float(times.mean())},
        "bytes_per_round": {"min": min(per_round), "max": max(per_round)},
        **({"devices": created.devices} if created.devices else {}),
    }


def print_bill(experiment: Experiment, execution: Execution, as_json: bool = False) -> None:
    """Print the plan as tables and sentences, or as JSON."""
    problem, created = planned(experiment, execution)
    numbers, e = to_json(problem, created), problem.experiment
    if as_json:
        return print_json(numbers)
    display = Display(e.rounds)
    task = (
        f", {e.model} on {e.dataset}, P = {created.params:,}; {population(problem)}, {e.rounds:,} rounds, "
        f"participation {e.participation}, seed {e.seed}"
    )
    display.note(Text.assemble((e.algo, "bold"), task))
    codecs = [f"{side}.{field}={name}" for side, by in problem.codecs.items() for field, name in by.items()]
    if codecs:
        display.note("codecs: " + ", ".join(codecs))
    display.traffic(numbers)
    times, spent = numbers["rounds_per_client"], numbers["bytes_per_round"]
    display.note(
        f"a client takes part in {extent((times['min'], times['max']))} rounds, {times['mean']:,.1f} on "
        f"average; a round costs {extent((spent['min'], spent['max']))} bytes"
    )
    if line := step_remark(experiment):
        display.note(line)
    if created.devices:
        display.note(sentence(created.devices))
    if created.least:
        least = " and ".join(f"{n:,} bytes {side}" for side, n in created.least.items())
        display.note(f"at most; at least {least}: if nothing changes after each client's first message")
    elif not created.exact:
        display.note(
            "at most: a codec's size depends on the values, or a message has parts that may be absent; "
            "a run with --rounds 3 measures it"
        )
    if e.until:
        display.note(f"at most: the run ends with the first evaluated round of {percent(e.until)}")
    return None


def sentence(devices: Mapping[str, Any]) -> str:
    """Return the seconds and the joules of a plan in words."""
    prefix = "at most " if devices.get("at_most") else "about " if devices["estimated"] else ""
    text = f"virtual clock: {prefix}{devices['simulated_seconds']:,.1f} s"
    for name, what in (("client_seconds", "is busy for {} s"), ("client_joules", "spends {} J")):
        if name in devices:
            numbers = [devices[name][key] for key in ("min", "max", "mean")] + [devices[f"{name}_total"]]
            least, most, mean, total = (f"{n:,.4g}" for n in numbers)
            text += f"; a client {what.format(f'{least} to {most}')}, {mean} on average, {total} in all"
    return text
