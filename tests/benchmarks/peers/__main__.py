"""Measures the same federated job in fedsim and in other tools, alternately, against the two-process floor.

    python -m tests.benchmarks.peers [--repeats 3] [--rounds 20] [--only flower,blazefl] [--environments DIR]
        [--json FILE] [--tiny] [--gpu]

10 clients of 600 examples, MLP 784-200-100-10 (P = 178,110), batch 32, one epoch of SGD, evaluation on
10,000 examples after each round, FedAvg. Data: FashionMNIST of FEDSIM_DATA, or random ones of its shape. All
begin with the same weights, train by the same function (programs/job.py; fedsim by its own), and have two
workers of one thread each. An environment a tool is made in DIR when it is first needed; --tiny takes only
those that are there. A tool that cannot be installed, or that fails, is a row with the reason.

Each tool runs --repeats times with two workers, once with one, and once with a worker killed by SIGKILL after
round 3 (--tiny: two workers, once). Memory is the peak of the summed PSS, sampled every quarter of a second.
--gpu: fedsim with one worker and pfl-research compute on a GPU; the floor stays one of CPUs, so no ratio to
it counts.

Lines are those of programs/ without blank ones and comments, plus those of another program that one uses;
programs/job.py is the same for all and is not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.common import options_of
from tests.benchmarks.floor import floor
from tests.benchmarks.peers.environments import DEFAULT, Peer, make, ready
from tests.benchmarks.peers.measure import Measured, busy_cores, failure
from tests.benchmarks.peers.relay import fedsim_row, peer_row
from tests.benchmarks.peers.runs import WORKERS, Place, data_folder, fedsim_run, peer_run

KILL_AFTER = 3
GRACE = 25.0
"""Seconds that a run of which a worker was killed may take longer than another one."""
NOTHING = "claims none, sends none"
PEERS = (
    Peer("Flower, simulation", "flower_simulation", "flower", sends="claims none; Ray's shared memory"),
    Peer(
        "Flower, deployment",
        "flower_deployment",
        "flower",
        sends="`flwr list` not asked",
        deadline=1800.0,
        relays=True,
    ),
    Peer("BlazeFL", "blazefl_processes", "blazefl", ("python3.13", "python3.12"), NOTHING),
    Peer("pfl-research", "pfl_simulation", "pfl", ("python3.11", "python3.12", "python3.10"), NOTHING),
    Peer("FedLab, standalone", "fedlab_serial", "fedlab", sends=NOTHING),
    Peer(
        "NVFlare, simulator",
        "nvflare_simulator",
        "nvflare",
        sends="claims none; TCP on the loopback",
        deadline=900.0,
        worker="simulator_worker",
    ),
    Peer("APPFL, serial", "appfl_serial", "appfl", sends=NOTHING, deadline=300.0),
    Peer(
        "APPFL, MPI",
        "appfl_mpi",
        "appfl",
        sends="claims none; MPI's shared memory",
        deadline=600.0,
        worker="appfl_mpi.py client",
    ),
)


@dataclass
class Row:
    """What was measured of a tool."""

    name: str
    lines: int
    bytes: str
    reason: str = ""
    per_round: list[float] = field(default_factory=list)
    over_floor: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    one_worker: str = ""
    killed: str = ""
    victim: str = ""

    def add(self, measured: Measured, warm: int, floor_seconds: float) -> None:
        """A run of two workers that came to its end."""
        self.per_round.append(measured.per_round(warm))
        self.over_floor.append(self.per_round[-1] / floor_seconds)
        self.first.append(measured.rounds[1])
        self.peak.append(measured.peak)
        self.accuracies.append(measured.accuracy)
        self.digests.append(measured.sha256)


def outcome(measured: Measured, digests: list[str], usual: float) -> str:
    """What happened after kill -9, in words."""
    if not measured.killed:
        return f"not measured: round {KILL_AFTER} did not end in time"
    if measured.killed == "no worker process":
        return measured.killed
    if measured.code is None:
        return f"hangs: no end within {measured.seconds:.0f} s"
    if measured.code:
        return f"ends with exit code {measured.code} after {max(measured.rounds)} rounds"
    bits = "the same digest" if measured.sha256 in digests else "another digest"
    if len(set(digests)) != 1:
        bits = "no two digests of this tool are comparable"
    return f"ends, {bits}, {measured.seconds - usual:+.1f} s"


def measure(
    rows: list[tuple[Row, Callable[..., Measured]]], place: Place, repeats: int, tiny: bool
) -> tuple[list[float], list[float]]:
    """Fill the rows, one run of each tool after the other; returns the floors, and before each the number of
    cores that other jobs used."""
    floors, others, usual = list[float](), list[float](), dict[str, float]()
    for _ in range(repeats):
        others.append(busy_cores())
        floors.append(floor(place.experiment(), place.data, place.warm))
        for row, once in rows:
            if row.reason:
                continue
            measured = once(place, 1 if place.device == "cuda" else WORKERS)
            if measured.code or len(measured.rounds) < place.rounds or not measured.sha256:
                row.reason = failure(measured)
                continue
            row.add(measured, place.warm, floors[-1])
            print(f"{row.name}: {measured.seconds:.1f} s", file=sys.stderr, flush=True)
            usual[row.name] = measured.seconds
    for row, once in rows:
        if row.reason or tiny:
            continue
        row.one_worker = once(place, 1).sha256
        killed = once(place, WORKERS, KILL_AFTER, usual[row.name] + GRACE)
        row.victim = killed.victim
        row.killed = outcome(killed, row.digests, usual[row.name])
        print(f"{row.name}: with one worker, and with one killed: measured", file=sys.stderr, flush=True)
    return floors, others


def relayed(rows: list[tuple[Row, Callable[..., Measured]]], place: Place) -> None:
    """Fill in the bytes of fedsim and of the peers whose programs let a relay count."""
    peers = {peer.name: peer for peer in PEERS if peer.relays}
    for row, _ in rows:
        if row.name in peers and not row.reason:
            counted = peer_row(peers[row.name], place, 10)
            row.bytes = f"{row.bytes} / {counted.bytes}"
        elif row.name == "fedsim":
            counted, _ = fedsim_row(place, 10, WORKERS)
            row.bytes = f"{counted.claims} / {counted.bytes}"


def middle(values: list[float], digits: int) -> str:
    """median (smallest to largest)"""
    if not values:
        return "–"
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def equal(row: Row) -> str:
    """Whether the digests of the runs are equal, and that of one worker too."""
    runs = ("yes" if len(set(row.digests)) == 1 else "no") if len(row.digests) > 1 else "–"
    return f"{runs} / {('yes' if {row.one_worker} == set(row.digests) else 'no') if row.one_worker else '–'}"


def table(rows: list[Row], floors: list[float]) -> list[str]:
    """The Markdown of what was measured."""
    lines = [
        "| | s a round | over the floor | s to the end of round 1 | peak PSS, MB | accuracy | lines | "
        "bytes claimed / relayed | equal digests: runs / one worker | kill -9 of a worker |",
        "|---|---|---|---|---|---|---|---|---|---|",
        f"| floor | {middle(floors, 3)} | 1 | – | – | – | – | – | – | – |",
    ]
    for row in rows:
        if row.reason:
            reason = row.reason.replace("|", "/")
            lines.append(f"| {row.name} | {reason} | – | – | – | – | {row.lines} | – | – | – |")
            continue
        figures = (
            *((row.per_round, 3), (row.over_floor, 2), (row.first, 2), (row.peak, 0)),
            (row.accuracies, 4),
        )
        cells = [middle(values, digits) for values, digits in figures]
        cells += [str(row.lines), row.bytes or "–", equal(row), row.killed or "–"]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return lines


def goals(rows: list[Row]) -> list[str]:
    """The goals, each with what was measured."""
    by_name = {row.name: row for row in rows if row.per_round}
    ours, flower, blaze = (by_name.get(n) for n in ("fedsim", "Flower, simulation", "BlazeFL"))
    lines = []
    if ours:
        lines.append(f"fedsim / floor: {statistics.median(ours.over_floor):.2f} (goal: at most 1.10)")
    if ours and flower:
        rounds = statistics.median(flower.per_round) / statistics.median(ours.per_round)
        first = statistics.median(flower.first) / statistics.median(ours.first)
        lines.append(f"Flower's simulation / fedsim, a round: {rounds:.2f} (goal: at least 3)")
        lines.append(f"Flower's simulation / fedsim, to the end of round 1: {first:.2f} (goal: at least 5)")
    if ours and blaze:
        ratio = statistics.median(ours.per_round) / statistics.median(blaze.per_round)
        lines.append(f"fedsim / BlazeFL, a round: {ratio:.2f} (goal: at most 1.30)")
    return lines


ON_GPU = "pfl"
"""The peer whose program takes the device of the settings."""


def selected(only: str, environments: Path, tiny: bool) -> list[tuple[Row, Callable[..., Measured]]]:
    """A row a tool, and how it is run; environments are made here."""
    rows: list[tuple[Row, Callable[..., Measured]]] = [(Row("fedsim", 1, ""), fedsim_run)]
    for peer in PEERS:
        named = {peer.requirements, peer.program} & set(only.split(","))
        if (only and not named) or (tiny and not ready(peer, environments)):
            continue
        print(f"environment of {peer.name}", file=sys.stderr, flush=True)
        row = Row(peer.name, peer.lines(), peer.sends, make(peer, environments))
        rows.append((row, lambda place, *how, peer=peer: peer_run(peer, place, *how)))
    return rows


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="peers, by the names of their requirements or programs")
    parser.add_argument("--environments", type=Path, default=DEFAULT, help=f"default: {DEFAULT}")
    parser.add_argument("--gpu", action="store_true", help="fedsim and pfl-research on a GPU")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    repeats, rounds, warm = (1, 2, 1) if options.tiny else (options.repeats, options.rounds, 5)
    if rounds <= max(warm, KILL_AFTER) and not options.tiny:
        parser.error(f"--rounds {rounds}: at least {max(warm, KILL_AFTER) + 1}")
    if options.gpu and not torch.cuda.is_available():
        parser.error("--gpu: torch sees no GPU here")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data, source = data_folder(scratch, options.tiny)
        device = "cuda" if options.gpu else "cpu"
        place = Place(scratch, data, options.environments.absolute(), rounds, warm, device)
        place.write_job()
        rows = selected(ON_GPU if options.gpu else options.only, place.environments, options.tiny)
        floors, others = measure(rows, place, repeats, options.tiny)
        if not options.tiny:
            relayed(rows, place)
    print(f"{datetime.now():%Y-%m-%d}, {source}, {rounds} rounds, n = {repeats}")
    print(f"cores that other jobs used before the runs: {', '.join(f'{cores:.2f}' for cores in others)}")
    if max(others) > 0.1:
        print(
            "The machine was not idle: the floor, which is pinned to cores, is too high, and no ratio counts."
        )
    print()
    print("\n".join([*table([row for row, _ in rows], floors), "", *goals([row for row, _ in rows])]))
    if options.json:
        values: dict[str, Any] = {"floor": floors, "others": others, "rows": [asdict(row) for row, _ in rows]}
        options.json.write_text(json.dumps({"rounds": rounds, "data": source, **values}, indent=1) + "\n")


if __name__ == "__main__":
    main()
