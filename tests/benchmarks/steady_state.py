"""Measures the wall time of a warm round, and of its computation alone (the floor).

    python -m tests.benchmarks.steady_state [--repeats 5] [--rounds 60] [--tiny]

The data have FashionMNIST's shape, and the model is the MLP 784-200-100-10. There are 10 clients of 600
examples, a batch of 32, 1 local epoch, Adam reset each round, and 2 workers on 2 cores. Every round evaluates
10,000 examples and writes all files. The floor is the same local training and evaluation, split over two
processes, without messages and files. Both are measured alternately, so that a load of the machine meets
both.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fedsim.experiment import Experiment
from tests.benchmarks.common import (
    FEW,
    FULL,
    fashion_shaped,
    launch,
    options_of,
    round_seconds,
    spread,
)
from tests.benchmarks.floor import floor

WARM = 5
SETTINGS = {"epochs": 1, "carry": False}


def experiment(algo: str, rounds: int) -> Experiment:
    return Experiment(
        algo=algo,
        dataset="fashion_mnist",
        fraction=0.1,
        partition="iid",
        model="mlp",
        clients=10,
        rounds=rounds,
        hyperparameters=SETTINGS,
    )


def measured(algo: str, data: Path, rounds: int, warm: int, out: Path) -> float:
    """Mean seconds of fedsim's warm rounds."""
    run = launch(
        out,
        *f"--algo {algo} --workers 2 --clients 10 --dataset fashion_mnist --fraction 0.1".split(),
        *f"--partition iid --model mlp --rounds {rounds} --set epochs=1 --set carry=false".split(),
        *f"--data-dir {data}".split(),
    )
    seconds = round_seconds(run, warm=warm)
    return sum(seconds) / len(seconds)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    repeats, rounds, warm = (1, 3, 1) if options.tiny else (options.repeats, options.rounds, WARM)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data = fashion_shaped(Path(scratch) / "data", FEW if options.tiny else FULL)
        for algo in ("fedavg", "fedlap_cov"):
            floors, ours, ratios = [], [], []
            for i in range(repeats):
                floors.append(floor(experiment(algo, rounds), data, warm))
                ours.append(measured(algo, data, rounds, warm, Path(scratch) / f"{algo}-{i}"))
                ratios.append(ours[-1] / floors[-1])
            print(f"{algo}: floor {spread(floors, ' s')}, fedsim {spread(ours, ' s')}")
            print(f"{algo}: ratio {spread(ratios)}", flush=True)


if __name__ == "__main__":
    main()
