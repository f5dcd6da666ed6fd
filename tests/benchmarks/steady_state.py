"""Measures the wall time of a warm round, and of its computation alone (the floor).

    python -m tests.benchmarks.steady_state [--repeats 5] [--rounds 60] [--tiny]

The data have FashionMNIST's shape, and the model is the MLP 784-200-100-10. There are 10 clients of 600
examples, a batch of 32, 1 local epoch, Adam reset each round, and 2 workers on 2 cores. Every round evaluates
10,000 examples and writes all files. The floor is the same local training and evaluation, split over two
processes, without messages and files. All are measured alternately, so that a load of the machine meets
all. fedlap is compared with fedavg: it has the same messages, and a dual.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fedsim.experiment import Experiment
from tests.benchmarks.common import FEW, FULL, fashion_shaped, launch, options_of, round_seconds, spread
from tests.benchmarks.floor import floor

WARM = 5
WITH_FLOOR = ("fedavg", "fedlap_cov")
ALGORITHMS = ("fedavg", "fedlap", "fedlap_cov")
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
        floors: dict[str, list[float]] = {algo: [] for algo in WITH_FLOOR}
        ours: dict[str, list[float]] = {algo: [] for algo in ALGORITHMS}
        for i in range(repeats):
            for algo in ALGORITHMS:
                if algo in WITH_FLOOR:
                    floors[algo].append(floor(experiment(algo, rounds), data, warm))
                ours[algo].append(measured(algo, data, rounds, warm, Path(scratch) / f"{algo}-{i}"))
    for algo in WITH_FLOOR:
        print(f"{algo}: floor {spread(floors[algo], ' s')}, fedsim {spread(ours[algo], ' s')}")
        print(f"{algo}: ratio {spread(ratios(ours[algo], floors[algo]))}")
    print(
        f"fedlap: {spread(ours['fedlap'], ' s')}; of fedavg {spread(ratios(ours['fedlap'], ours['fedavg']))}"
    )


def ratios(seconds: list[float], of: list[float]) -> list[float]:
    return [mine / other for mine, other in zip(seconds, of, strict=True)]


if __name__ == "__main__":
    main()
