"""fedsim plan: an experiment's cost on the wire, from its schedule and the sizes of its messages alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.text import Text

from fedsim.asynchrony import AsyncSchedule
from fedsim.data.partitions import partition
from fedsim.experiment import Experiment, build_algorithm
from fedsim.participation import Participation, Schedule
from fedsim.problem import Problem
from fedsim.tree import Tree, sums_dims, sums_message
from fedsim.virtual_clock import Hops, Ints, indices
from fedsim.wire.wire_size import RUN_NAME, EnvelopeSize, envelope_size
from launch.configuration.execution import Execution
from launch.numbers import extent, size, target
from launch.runs.client_costs import ClientCosts, sent_once
from launch.runs.device_costs import DeviceCosts
from launch.session.display import Display, population
from launch.terminal import print_json
from protocols import find

PLANNED = ("algo", "model", "dataset", "clients", "rounds", "participation", "seed")
"""Keys of an experiment that `to_json` includes."""


@dataclass
class Plan:
    """The planned bytes of the algorithm, by (direction, field, layer) and by round. exact: whether no size
    depends on values. costs: the bytes per client and round and once per client. took_part: by client, the
    number of rounds with a broadcast. devices: DeviceCosts.totals; None without a clock."""

    params: int
    took_part: Ints
    costs: ClientCosts
    exact: bool = True
    bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    edges: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Bytes between edge servers and the root, by the keys of `bytes`."""
    rounds: dict[int, dict[str, int]] = field(default_factory=dict)
    devices: dict[str, Any] | None = None

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
    """The clients of a round: those that get the broadcast, whether each of them answers it, and those whose
    uploads are folded."""

    asked: Ints
    answers: npt.NDArray[np.bool_]
    folded: Ints

    @classmethod
    def of(cls, p: Participation) -> _Clients:
        """Return the clients of a round's schedule."""
        asked = indices(p.participants)
        answers = ~np.isin(asked, indices(sorted(p.dropouts)))
        return cls(asked, answers, np.setdiff1d(asked[answers], indices(sorted(p.lost_uploads))))


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
    costs, clock = ClientCosts(sent_once(problem.algorithm)), problem.rounds.clock
    created = Plan(problem.net.layout.size, np.zeros(count, dtype=np.int64), costs)
    created.exact = problem.rounds.policy.sizes_are_fixed
    devices = DeviceCosts(clock, indices(examples or problem.sizes), steps) if clock else None
    exchanges = {0: len(problem.algorithm.setup), 1: len(problem.algorithm.exchanges)}  # of set-up and round
    sizes = {r: {e: problem.messages.sizes(r, e, run) for e in range(1, n + 1)} for r, n in exchanges.items()}

    def add(round: int, clients: _Clients) -> None:
        """Add a round; round 0 is the set-up."""
        for e, of in sizes[min(round, 1)].items():
            # after the first exchange, those that have answered get the broadcast
            there = clients.answers if e > 1 else np.ones(len(clients.asked), dtype=np.bool_)
            asked, answers = clients.asked[there], clients.answers[there]
            created.add(round, e, "down", of["down"], federated * len(asked))
            created.add(round, e, "up", of["up"], federated * int(answers.sum()))
            hops = None
            if problem.rounds.tree and federated and len(asked):
                hops = _add_edges(
                    created, problem, problem.rounds.tree, (round, e, run), asked, clients.folded
                )
            if devices:
                down, up = of["down"].total, of["up"].total
                devices.add(round, e, asked, np.full(len(asked), down), answers * up, hops)

    everyone = np.arange(count)
    add(0, _Clients(everyone, np.ones(count, dtype=np.bool_), everyone))
    for number, side, name in costs.optional:
        rows = sizes[1][number][side].rows
        costs.once[side] += count * sum(n for (field, _), n in rows.items() if field == name)
    before, clients = Participation(()), _Clients.of(Participation(()))
    for r in range(1, problem.experiment.rounds + 1):
        participation = participations(r)
        if participation != before:
            before, clients = participation, _Clients.of(participation)
        created.took_part[clients.asked] += 1
        add(r, clients)
    created.devices = devices.totals() if devices else None
    return created


def of_a_round(problem: Problem, clients: int) -> str:
    """Return the bytes of a round with so many clients in each direction, as a text."""
    if problem.algorithm.centralised:
        return "nothing is sent"
    sizes = [problem.messages.sizes(1, e) for e in range(1, len(problem.algorithm.exchanges) + 1)]
    exact = problem.rounds.policy.sizes_are_fixed and all(s.exact for of in sizes for s in of.values())
    down, up = (size(clients * sum(of[side].total for of in sizes)) for side in ("down", "up"))
    return f"{'' if exact else 'at most '}{down} down and {up} up a round"


def _add_edges(
    created: Plan, problem: Problem, tree: Tree, of: tuple[int, int, str], asked: Ints, folded: Ints
) -> Hops:
    """Add the bytes between edge servers and the root in an exchange, and return them by edge server.

    of: the round, the exchange and the run's name. asked: clients that get the broadcast. folded: clients
    with a folded upload.
    """
    round, number, run = of
    heard, uploads = (np.bincount(tree.owners[ids], minlength=len(tree.names)) for ids in (asked, folded))
    down, up = problem.messages.sizes(round, number, run, "relayed").values()
    sizes, hop = [("down", down, int((heard > 0).sum())), ("up", up, len(folded))], uploads * up.total
    if tree.sums(round):
        sizes, hop, exchange = sizes[:1], np.zeros_like(uploads), problem.messages.exchange(round, number)
        for count in np.unique(uploads[uploads > 0]).tolist():  # the size of an edge server's sums of so many
            dims, merging = sums_dims(exchange, problem.messages.dims, count), uploads == count
            message, layout = sums_message(exchange), problem.net.layout
            size = envelope_size(message, {}, dims, layout, kind="sums", run=run)
            sizes.append(("up", size, int(merging.sum())))
            hop[merging] = size.total
    for side, size, n in sizes:
        created.edges.update({(side, *part): n * bytes for part, bytes in size.rows.items()})
    return Hops((heard > 0) * down.total, hop)


def planned(experiment: Experiment, execution: Execution) -> tuple[Problem, Plan]:
    """Build the problem, and add up the sizes of its messages."""
    algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
    problem = Problem.outline(experiment, algorithm, Path(execution.data_dir) if execution.data_dir else None)
    created, dataset = problem.experiment, problem.dataset
    timed = problem.rounds.clock is not None
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
    rounds = replace(problem.rounds, sizes=sizes)
    return problem, plan(problem, rounds.schedule(), examples=sizes, steps=rounds.policy.schedule)


def to_json(problem: Problem, created: Plan) -> dict[str, Any]:
    """Return the plan for --json: `bytes` is nested as in summary.json; the rest are the printed numbers."""
    e, times = problem.experiment, created.took_part
    per_round = [sides["down"] + sides["up"] for r, sides in created.rounds.items() if r] or [0]
    return {
        **{key: getattr(e, key) for key in PLANNED},
        "until": e.until or None,
        "params": created.params,
        "exact": created.exact,
        "bytes": created.nested(),
        **{f"bytes_{side}": created.total(side) for side in ("down", "up")},
        **created.costs.units(params=created.params, participations=int(times.sum()), clients=len(times)),
        "rounds_per_client": {"min": int(times.min()), "max": int(times.max()), "mean": float(times.mean())},
        "bytes_per_round": {"min": min(per_round), "max": max(per_round)},
        **({"devices": _spread(problem, created.devices)} if created.devices else {}),
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
    codecs = [
        f"{side}.{field}={name}" for side, by in problem.messages.codecs.items() for field, name in by.items()
    ]
    if codecs:
        display.note("codecs: " + ", ".join(codecs))
    display.traffic(numbers)
    times, spent = numbers["rounds_per_client"], numbers["bytes_per_round"]
    display.note(
        f"a client takes part in {extent((times['min'], times['max']))} rounds, {times['mean']:,.1f} on "
        f"average; a round costs {extent((spent['min'], spent['max']))} bytes"
    )
    if "devices" in numbers:
        display.note(sentence(numbers["devices"]))
    if not created.exact:
        display.note(
            "at most: a codec's size depends on the values, or a message or a part of it may be absent; "
            "a run with --rounds 3 measures it"
        )
    if e.until:
        display.note(f"at most: the run ends with the first evaluated round of {target(e.until)}")
    return None


def _spread(problem: Problem, totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeviceCosts.totals without waits, and with least, largest and mean value in place of lists."""
    result = {"simulated_seconds": totals["simulated_seconds"]}
    for name in [name for name in ("client_seconds", "client_joules") if name in totals]:
        values, total = totals[name], totals[f"{name}_total"]
        result[name] = {"min": min(values), "max": max(values), "mean": float(np.mean(values))}
        result[f"{name}_total"] = total
    return result | ({} if problem.rounds.policy.sizes_are_fixed else {"at_most": True})


def sentence(devices: Mapping[str, Any]) -> str:
    """Return the seconds and the joules of a plan in words."""
    prefix = "at most " if devices.get("at_most") else ""
    text = f"virtual clock: {prefix}{devices['simulated_seconds']:,.1f} s"
    for name, what in (("client_seconds", "is busy for {} s"), ("client_joules", "spends {} J")):
        if name in devices:
            numbers = [devices[name][key] for key in ("min", "max", "mean")] + [devices[f"{name}_total"]]
            least, most, mean, total = (f"{n:,.4g}" for n in numbers)
            text += f"; a client {what.format(f'{least} to {most}')}, {mean} on average, {total} in all"
    return text
