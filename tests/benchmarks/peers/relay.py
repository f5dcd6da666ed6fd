"""Measures what tools send over TCP for one federated job, with `fedsim relay` in front of their servers.

    python -m tests.benchmarks.peers.relay [--clients 3] [--rounds 5] [--only flower,appfl]
        [--environments DIR] [--json FILE] [--tiny]

FedAvg with the MLP (P = 178,110, so 4 P is 712,440 bytes) and the data of tests.benchmarks.peers, all clients
in every round. fedsim runs with remote workers, one a client, so its traffic is encrypted; its first row is
all of that traffic, its second what the ledger books for the algorithm. An environment of a tool is made in
DIR when it is first needed; --tiny makes none and shows fedsim's rows alone.

"a client and round" is a round's bytes divided by the clients and by 4 P. A round begins with a line of the
tool's output; what passed before the first round, or after the last one, is not in that column.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from tests.benchmarks.common import options_of, summary
from tests.benchmarks.peers.environments import DEFAULT, Peer, make
from tests.benchmarks.peers.runs import Place, arguments, data_folder, prepared

PARAMS = 178_110
UNIT = 4 * PARAMS
ROUND = r"\[ROUND (\d+)"
"""The line with which Flower's server and programs/appfl_grpc.py begin a round."""
DEADLINE = 1800.0
RELAY = (sys.executable, "-m", "launch", "relay")
FEDSIM = f"{shlex.quote(sys.executable)} -m launch"
PEERS = (
    Peer("Flower, deployment", "flower_deployment", "flower"),
    Peer("APPFL, gRPC", "appfl_grpc", "appfl"),
)
SIZE = re.compile(r"\w+ \([\d.]+ [kMG]?i?B\)|\b[\d.,]+ (?:[kMG]i?B|bytes)\b(?: down| up)?")
"""What a tool writes in its output if it says how much it sends."""


@dataclass
class Row:
    """What a tool says of its bytes, and what the relay counted.

    Attributes:
        claims: What the tool itself says.
        down, up: Bytes of the whole run.
        rounds: Bytes down and up by the round's number; 0 is what passed before round 1.
        connections: Their number.
        residual: Kernel minus relay, down and up.
        reason: Why nothing was measured; '' if it was.
    """

    name: str
    claims: str = "nothing"
    down: int = 0
    up: int = 0
    rounds: dict[int, tuple[int, int]] | None = None
    connections: int = 0
    residual: tuple[int, int] = (0, 0)
    reason: str = ""

    @property
    def bytes(self) -> str:
        """Both directions together, or why they were not measured."""
        return f"not measured: {self.reason}" if self.reason else f"{self.down + self.up:,}"


def free_port() -> int:
    """A port that no program uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def relayed(name: str, port: int, through: int, command: Sequence[str], out: Path) -> Row:
    """Run a command behind a relay from `through` to its server at `port`."""
    options = ["--listen", f"127.0.0.1:{through}", "--to", f"127.0.0.1:{port}", "--round", ROUND]
    words = [*RELAY, *options, "--params", str(PARAMS), "--out", str(out), "--", *command]
    print(f"{name}, behind a relay", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, errors="replace")
    except subprocess.TimeoutExpired:
        return Row(name, reason=f"no end within {DEADLINE:.0f} s")
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr, flush=True)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Row(name, reason=f"exit code {done.returncode}: {lines[-1][:160]}")
    counted = json.loads((out / "relay.json").read_text())
    sizes = SIZE.findall(done.stderr + done.stdout.partition(" to 127.0.0.1:")[0])
    return Row(
        name,
        ", ".join(dict.fromkeys(sizes)) or "nothing",
        counted["bytes"]["down"],
        counted["bytes"]["up"],
        {r["number"]: (r["down"], r["up"]) for r in counted["rounds"]},
        len(counted["connections"]),
        (counted["residual"]["down"], counted["residual"]["up"]),
    )


def fedsim_row(place: Place, clients: int, workers: int) -> tuple[Row, Row]:
    """fedsim's rows: of the run behind a relay, and of what its ledger books for the algorithm."""
    out, port, through = place.scratch / "fedsim", free_port(), free_port()
    remote = f"--remote-workers {workers} --bind tcp://127.0.0.1:{port} --out {out}"
    join = f"--join {out}/join.json --connect tcp://127.0.0.1:{through} --data-dir {place.data}"
    script = f"""
        {FEDSIM} launch {shlex.join(arguments(place, clients))} {remote} & coordinator=$!
        until [ -e {out}/join.json ]; do kill -0 $coordinator || exit 1; sleep 0.05; done
        for i in {" ".join(map(str, range(workers)))}; do {FEDSIM} worker {join} --worker $i & done
        wait $coordinator
    """
    row = relayed("fedsim", port, through, ("sh", "-c", script), place.scratch / "relay-fedsim")
    own = Row("fedsim's ledger: algorithm", reason=row.reason)
    if row.reason:
        return row, own
    kinds = summary(out)["bytes"]
    whole = [sum(_booked(kinds[kind], d) for kind in kinds) for d in ("down", "up")]
    row.claims, row.rounds = f"{whole[0]:,} down, {whole[1]:,} up", {}
    own.claims, own.down, own.up = "–", _booked(kinds["algorithm"], "down"), _booked(kinds["algorithm"], "up")
    own.rounds = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        of_round = json.loads(line)
        own.rounds[of_round["round"]] = of_round["bytes_down"], of_round["bytes_up"]
    return row, own


def _booked(kind: dict[str, dict[str, dict[str, int]]], direction: str) -> int:
    """The bytes of a kind in summary.json."""
    return sum(size for layers in kind.get(direction, {}).values() for size in layers.values())


def peer_row(peer: Peer, place: Place, clients: int) -> Row:
    """A tool's row; its environment is made if there is none."""
    if reason := make(peer, place.environments):
        return Row(peer.name, reason=reason)
    port, through = free_port(), free_port()
    command, environment = prepared(peer, place, clients, clients=clients, port=port, through=through)
    removed = [word for key in os.environ if key not in environment for word in ("-u", key)]
    changed = [f"{key}={value}" for key, value in environment.items() if os.environ.get(key) != value]
    words = ["env", *removed, *changed, *command]
    return relayed(peer.name, port, through, words, place.scratch / f"relay-{peer.program}")


def table(rows: Sequence[Row], clients: int, rounds: int) -> list[str]:
    """The Markdown of what was measured."""
    lines = [
        "| | says itself | bytes down | bytes up | a client and round, down / 4 P | up / 4 P | connections | "
        "kernel - relay |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.reason:
            lines.append(f"| {row.name} | {row.bytes.replace('|', '/')} | – | – | – | – | – | – |")
            continue
        cells = [row.claims, f"{row.down:,}", f"{row.up:,}"]
        for side in (0, 1):
            units = [
                sizes[side] / clients / UNIT for n, sizes in (row.rounds or {}).items() if 0 < n <= rounds
            ]
            cells.append(f"{min(units):.4f} to {max(units):.4f}" if units else "–")
        relays = (str(row.connections), f"{row.residual[0]}, {row.residual[1]}")
        cells += relays if row.connections else ("–", "–")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="tools, by the names of their requirements")
    parser.add_argument("--environments", type=Path, default=DEFAULT, help=f"default: {DEFAULT}")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    clients, rounds = (2, 1) if options.tiny else (options.clients, options.rounds)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data, source = data_folder(scratch, options.tiny)
        place = Place(scratch, data, options.environments.absolute(), rounds, 0)
        rows = list(fedsim_row(place, clients, clients))
        if not options.tiny:
            place.write_job()
            selected = [peer for peer in PEERS if not options.only or peer.requirements in options.only]
            rows += [peer_row(peer, place, clients) for peer in selected]
    print(f"{datetime.now():%Y-%m-%d}, {source}, {clients} clients, {rounds} rounds, 4 P = {UNIT:,} bytes")
    print("\n".join(["", *table(rows, clients, rounds)]))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
