"""Compares the virtual clock's seconds with those of real workers behind shaped links.

    python -m tests.benchmarks.shaped_link [--rates 5,20,100] [--rtts 2,20,100] [--losses 0,1] [--rounds 8]
                                           [--pause 0] [--congestion cubic] [--tiny]

Three remote workers, each in a network namespace of its own behind a link of so many Mbit/s, milliseconds of
round trip and percent of lost packets (tests/support/shaped_links.py), train the MLP of 178,110 parameters
with fedavg: 0.71 MB down and up in each round. --pause: seconds for which a client sleeps in each task; TCP
then starts slowly again, and the clock is told initcwnd=10.

The seconds are those of timeline.csv: from a task's dispatch to its answer, less what the worker computed (or
slept). A client's are the mean over clients and rounds, without the first round; a round's the median of its
slowest client's; a run's the sum of all rounds. A client's seconds over loopback (encryption, copies, queues)
are measured first, and are --compute of the clock. The first column of the clock knows rate and round trip
alone; all others know TCP (overhead, loss, initcwnd). An error is (simulated - measured) / measured.

It needs root and /dev/net/tun. Where it may not run, it says so and ends with exit code 77.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fedsim.virtual_clock import clock
from launch.runs.folder import RunFolder
from tests.benchmarks.common import fashion_shaped, options_of
from tests.support import preloaded
from tests.support.shaped_links import SERVER, Shape, ShapedLinks, before_others, unavailable

SKIPPED = 77
"""Exit code of a check that this machine cannot carry out, as in Automake."""
WORKERS, EXAMPLES, PORT, DEADLINE = 3, 64, 5555, 900.0
PAUSED = """
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from protocols.fedavg import FedAvg

@dataclass(frozen=True)
class Paused(FedAvg):
    name: ClassVar[str] = "paused"

    def client_update(self, *args: Any, **named: Any) -> Any:
        time.sleep({pause})
        return super().client_update(*args, **named)
"""


@dataclass(frozen=True)
class Measured:
    """What a run took, and what the clock says.

    clients: seconds of each client's exchange, from round 2. rounds: of the slowest client's, by round, in
    order. simulated: the clock's seconds of the rounds. bare: those of a round by rate and round trip alone.
    on_links, on_streams: bytes down and up, of all packets and in the ledger.
    """

    clients: list[float]
    rounds: list[float]
    simulated: list[float]
    bare: float
    on_links: tuple[int, int]
    on_streams: tuple[int, int]


def job(folder: Path, pause: float, rounds: int) -> tuple[str, ...]:
    """Return the options of all runs. Their data and algorithm are written to `folder`."""
    data = fashion_shaped(folder, (WORKERS * EXAMPLES, 100))
    algorithm = folder / "paused.py"
    algorithm.write_text(PAUSED.format(pause=pause))
    training = {"optimiser": "sgd", "epochs": 1, "batch_size": EXAMPLES}
    return (
        *("--dataset", "fashion_mnist", "--inputs", "raw", "--partition", "iid", "--model", "mlp"),
        *("--algo", f"{algorithm}:Paused", "--clients", str(WORKERS), "--rounds", str(rounds)),
        *(word for key, value in training.items() for word in ("--set", f"{key}={value}")),
        # an evaluation sends the model to a worker once more
        *("--eval-every", str(rounds), "--durability", "process", "--data-dir", str(data)),
    )


def link_of(shape: Shape) -> str:
    """--link of a shape by its rate and round trip alone."""
    rate = f"{shape.rate / 1e6:g}mbit"
    return f"up={rate},down={rate},rtt={1000 * shape.rtt:g}ms"


def tcp_of(shape: Shape, pause: float) -> str:
    """What --link says of TCP."""
    return (
        ",overhead=tcp" + (f",loss={shape.loss:g}" if shape.loss else "") + (",initcwnd=10" if pause else "")
    )


def play(out: Path, host: str, *options: str, namespaces: Sequence[int | None]) -> RunFolder:
    """Run a job with remote workers; namespaces: of the coordinator and of each worker, None for this one."""
    bind = ("--remote-workers", str(WORKERS), "--bind", f"tcp://{host}:{PORT}", "--out", str(out))
    with ExitStack() as running:
        coordinator = _start(running, namespaces[0], "launch", *options, *bind)
        _await(out / "join.json", coordinator)
        join = ("worker", "--join", str(out / "join.json"), "--data-dir", str(out.parent))
        workers = [_start(running, n, *join, "--seat", str(i)) for i, n in enumerate(namespaces[1:])]
        codes = [process.wait(DEADLINE) for process in (coordinator, *workers)]
        assert not any(codes), f"exit codes of coordinator and workers: {codes}"
    return RunFolder.open(out)


def exchanges_of(run: RunFolder) -> list[list[float]]:
    """Seconds of every client's exchange, without its computation, by round."""
    seconds = defaultdict(list)
    for round, *_, what, dispatched, arrived, computing in run.timeline_rows():
        if what == "task":
            seconds[round].append(arrived - dispatched - computing)
    result = [seconds[r] for r in range(1, run.experiment["rounds"] + 1)]
    assert all(len(one) == WORKERS for one in result), "not every exchange was measured"
    return result


def measured(out: Path, job: tuple[str, ...], shape: Shape, pause: float, compute: str) -> Measured:
    """Run a job behind links of this shape; compute: --compute."""
    with ShapedLinks(WORKERS, shape) as links:
        described = ("--link", link_of(shape) + tcp_of(shape, pause), "--compute", compute)
        namespaces = [links.server, *(links.worker(i) for i in range(WORKERS))]
        run = play(out, SERVER, *job, *described, namespaces=namespaces)
        passed = links.passed()
    exchanges, rounds = exchanges_of(run), run.experiment["rounds"]
    ledger = run.ledger
    sent = ledger[(ledger.kind == "algorithm") & (ledger["round"] == rounds) & (ledger.client == 0)]
    sizes, streams = (frame.groupby("direction")["bytes"].sum() for frame in (sent, ledger))
    alone = clock(link_of(shape), compute, "", clients=WORKERS, seed=0)
    assert alone is not None
    costs = run.summary["devices"]
    return Measured(
        [seconds for one in exchanges[1:] for seconds in one],
        [max(one) for one in exchanges],
        [costs["simulated_seconds"] / rounds] * rounds,
        alone.seconds(1, 0, EXAMPLES, int(sizes["down"]), int(sizes["up"])),
        (sum(down["bytes"] for down, _ in passed), sum(up["bytes"] for _, up in passed)),
        (int(streams["down"]), int(streams["up"])),
    )


def _start(running: ExitStack, namespace: int | None, *words: str) -> preloaded.Process:
    """Start a command in the network namespace of a process; it is killed when `running` closes."""
    with open(os.devnull, "r+b") as nothing:
        process = preloaded.Process(list(words), nothing.fileno(), nothing.fileno(), 2, namespace)
    running.callback(process.kill)
    before_others(process.pid)
    return process


def _await(file: Path, process: preloaded.Process) -> None:
    until = time.monotonic() + DEADLINE
    while not file.exists():
        assert process.poll() is None, "the coordinator has ended"
        assert time.monotonic() < until, f"no {file}"
        time.sleep(0.02)


HEADS = (
    *("Mbit/s", "rtt ms", "% lost", "a client, s", "a round, s", "rate and rtt alone, s", "error of a round"),
    *("with TCP, s", "error of a client", "error of a round", "error of the run"),
)


def row(shape: Shape, run: Measured) -> str:
    """A line of the table."""
    client, of_round = statistics.mean(run.clients), statistics.median(run.rounds[1:])
    simulated = statistics.mean(run.simulated)
    shown = [f"{shape.rate / 1e6:g}", f"{1000 * shape.rtt:g}", f"{100 * shape.loss:g}"]
    shown += [f"{client:.3f}", f"{of_round:.3f}", f"{run.bare:.3f}", _error(run.bare, of_round)]
    shown += [f"{simulated:.3f}", _error(simulated, client), _error(simulated, of_round)]
    return f"| {' | '.join([*shown, _error(sum(run.simulated), sum(run.rounds))])} |"


def _error(simulated: float, seconds: float) -> str:
    return f"{100 * (simulated / seconds - 1):+.1f} %"


def compare(options: argparse.Namespace, scratch: Path) -> None:
    """Measure all links, and print the table."""
    every = job(scratch, options.pause, options.rounds)
    loopback = play(scratch / "loopback", "127.0.0.1", *every, namespaces=[None] * (WORKERS + 1))
    alone = statistics.mean(seconds for one in exchanges_of(loopback)[1:] for seconds in one)
    compute = f"{1e6 * alone / EXAMPLES:.3f}us"
    print(f"a client without a link: {1000 * alone:.1f} ms, as --compute {compute}", flush=True)
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    links, streams = [0, 0], [0, 0]
    for loss in options.losses:
        for rate in options.rates:
            for rtt in options.rtts:
                shape = Shape(1e6 * rate, rtt / 1000, loss / 100, options.congestion)
                run = measured(scratch / f"{loss:g}-{rate:g}-{rtt:g}", every, shape, options.pause, compute)
                print(row(shape, run), flush=True)
                if not loss:
                    links = [a + b for a, b in zip(links, run.on_links, strict=True)]
                    streams = [a + b for a, b in zip(streams, run.on_streams, strict=True)]
    if all(streams):
        down, up = (on_link / on_stream for on_link, on_stream in zip(links, streams, strict=True))
        print(f"bytes on links / on streams without loss: {down:.4f} down, {up:.4f} up")


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rates", type=numbers, default=[5.0, 20.0, 100.0])
    parser.add_argument("--rtts", type=numbers, default=[2.0, 20.0, 100.0])
    parser.add_argument("--losses", type=numbers, default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--congestion", default="cubic")
    options = parser.parse_args()
    if reason := unavailable():
        print(f"skipped, nothing was compared: {reason}", file=sys.stderr)
        sys.exit(SKIPPED)
    if options.tiny:
        options.rates, options.rtts, options.losses, options.rounds = [50.0], [10.0], [0.0], 3
    with tempfile.TemporaryDirectory() as scratch:
        compare(options, Path(scratch))


if __name__ == "__main__":
    main()
