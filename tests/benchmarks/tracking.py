"""Measures what --track costs a round.

    python -m tests.benchmarks.tracking [--repeats 5] [--rounds 60] [--trackers tensorboard,mlflow] [--tiny]

The job is that of tests.benchmarks.steady_state: FashionMNIST's shape, MLP 784-200-100-10, fedavg, 10
clients, 2 workers on 2 cores, every round evaluated. Runs with and without a tracker alternate, so that a
load of the machine meets both. A ratio is that of the median rounds of two neighbours, of the second half
of their rounds: in the first, the tracker's process imports its packages, once. The second figure scatters
less: the CPU time of that process during the run, per second of the run, and what it takes to begin.
A tracker's own service process (wandb has one) is in the ratio alone.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
from pathlib import Path

from fedsim.errors import UsageError
from launch.tracking import TRACKERS, check_installed, selected
from tests.benchmarks.common import FEW, FULL, fashion_shaped, launch, options_of, round_seconds, spread

COST = re.compile(r"fedsim: ([\d.]+) s of CPU to begin, ([\d.]+) s during the run")
"""launch.tracking.follow.COST as it stands in a log."""


def tracked(data: Path, rounds: int, out: Path, tracker: str) -> Path:
    """A run. tracker: "none" for none."""
    return launch(
        out,
        *f"--algo fedavg --workers 2 --clients 10 --dataset fashion_mnist --data-dir {data}".split(),
        *f"--fraction 0.1 --partition iid --model mlp --rounds {rounds}".split(),
        *f"--set epochs=1 --set carry=false --track {tracker}".split(),
    )


def costs(run: Path, tracker: str) -> tuple[float, float]:
    """CPU seconds of a tracker's process to begin, and per second of the run while it went on."""
    begun, computed = COST.findall((run / "logs" / f"track-{tracker}.log").read_text())[-1]
    return float(begun), float(computed) / sum(round_seconds(run, warm=-1))


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--trackers", default=",".join(TRACKERS))
    options = parser.parse_args()
    repeats, rounds = (1, 4) if options.tiny else (options.repeats, options.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data = fashion_shaped(Path(scratch) / "data", FEW if options.tiny else FULL)
        for choice in selected(options.trackers):
            try:
                check_installed((choice,))
            except UsageError as e:
                print(e)
                continue
            ratios, begun, shares, rounds_took = [], [], [], []
            for i in range(repeats):
                seconds = {}
                for name in ("none", choice.name) if i % 2 else (choice.name, "none"):
                    run = tracked(data, rounds, Path(scratch) / f"{choice.name}-{i}-{name}", name)
                    seconds[name] = statistics.median(round_seconds(run, warm=rounds // 2))
                    if name != "none":
                        of_this = costs(run, name)
                        begun.append(of_this[0])
                        shares.append(100 * of_this[1])
                ratios.append(seconds[choice.name] / seconds["none"])
                rounds_took.append(seconds["none"])
            print(f"{choice.name}: ratio {spread(ratios)}, a round without it {spread(rounds_took, ' s')}")
            share = spread(shares, " %", digits=2)
            print(f"{choice.name}: its process computes {share}, to begin {spread(begun, ' s')}", flush=True)


if __name__ == "__main__":
    main()
