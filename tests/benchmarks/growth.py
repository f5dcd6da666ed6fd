"""Measures how a round grows with the number of clients, and a start with the number of workers.

    python -m tests.benchmarks.growth [--clients 1,10,100,1000,10000] [--workers 1,2,4,8,16,32,64] [--tiny]

Clients: fedlap, which keeps a dual for each, on the MLP d-100-10 and data of FashionMNIST's shape; 6 examples
a client, 10 participants a round, 1 local epoch, 2 workers, 20 rounds. The seconds are those of a round
without the first five. Workers: fedavg with 64 clients, 2 rounds. Memory is the peak of the summed PSS of
all processes, in a run of its own, because looking at it takes time from the others.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.common import FULL, fashion_shaped, launch, options_of, round_seconds, summary, watched

PARTICIPANTS, EXAMPLES = 10, 6
WARM = 5


@dataclass(frozen=True)
class Measured:
    """seconds: the median of a warm round. first: seconds to the end of round 1. memory: bytes, the peak."""

    seconds: float
    first: float
    memory: int


def measured(scratch: Path, name: str, arguments: list[str], warm: int) -> Measured:
    """Two runs with the same options: one for the time, one for the memory."""
    run = launch(scratch / name, *arguments)
    seconds = statistics.median(round_seconds(run, warm))
    peak, _ = watched(scratch / f"{name}-memory", *arguments, pause=0.2)
    return Measured(seconds, summary(run)["seconds_to_first_round"], sum(peak))


def with_clients(clients: int, data: Path, rounds: int) -> list[str]:
    share = "full" if clients <= PARTICIPANTS else f"{PARTICIPANTS / clients:g}"
    fraction = clients * EXAMPLES / FULL[0]
    return [
        *f"--algo fedlap --dataset fashion_mnist --data-dir {data} --model mlp_small --workers 2".split(),
        *f"--partition iid --clients {clients} --fraction {fraction:.6f} --participation {share}".split(),
        *f"--rounds {rounds} --set epochs=1 --eval-every {rounds}".split(),
    ]


def with_workers(workers: int, data: Path, clients: int) -> list[str]:
    return [
        *f"--algo fedavg --dataset fashion_mnist --data-dir {data} --model mlp_small".split(),
        *f"--workers {workers} --partition iid --clients {clients} --fraction 0.1 --rounds 2".split(),
        *["--set", "epochs=1"],
    ]


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--clients", default="1,10,100,1000,10000")
    parser.add_argument("--workers", default="1,2,4,8,16,32,64")
    options = parser.parse_args()
    all_clients = [2, 20] if options.tiny else numbers(options.clients)
    all_workers = [1, 2] if options.tiny else numbers(options.workers)
    rounds, warm = (2, 0) if options.tiny else (20, WARM)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data = fashion_shaped(scratch / "data")
        print("| clients | ms a round | s to the end of round 1 | memory, MB |\n|---|---|---|---|")
        for clients in all_clients:
            m = measured(scratch, f"clients-{clients}", with_clients(clients, data, rounds), warm)
            print(
                f"| {clients:,} | {1e3 * m.seconds:.0f} | {m.first:.1f} | {m.memory / 1e6:.0f} |", flush=True
            )
        print("\n| workers | s to the end of round 1 | memory, MB | MB a worker more |\n|---|---|---|---|")
        before: tuple[int, int] | None = None
        for workers in all_workers:
            clients = max(all_workers)
            m = measured(scratch, f"workers-{workers}", with_workers(workers, data, clients), 0)
            more = f"{(m.memory - before[1]) / (workers - before[0]) / 1e6:.0f}" if before else "-"
            before = workers, m.memory
            print(f"| {workers} | {m.first:.1f} | {m.memory / 1e6:.0f} | {more} |", flush=True)


if __name__ == "__main__":
    main()
