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
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.gaussian import Point
from fedsim.learning.solvers.first_order import minimise
from fedsim.problem import Problem
from protocols import find
from tests.benchmarks.common import (
    FEW,
    FULL,
    fashion_shaped,
    launch,
    options_of,
    round_seconds,
    spread,
)
from workers.worker.main import fix_numerics

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


def half_of_the_work(algo: str, data: Path, index: int, rounds: int, warm: int, barrier: Barrier) -> None:
    """Every second client's training and every second piece of the evaluation, `rounds` times, after
    `warm` rounds that are not counted."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index % os.cpu_count()]})  # type: ignore[operator]
    fix_numerics(1, "cpu")
    algorithm = build_algorithm(find(algo), SETTINGS)
    problem = Problem.build(experiment(algo, rounds), algorithm, data)
    for r in range(-warm, rounds):
        if not r:
            barrier.wait(120)
        for k in range(index, 10, 2):
            task = problem.task(warm + r, 1, k)
            shard = problem.shard(k)
            fit = minimise(shard, problem.start, how=algorithm.local, rng=task.rng, round=1)  # type: ignore[attr-defined]
            if algo == "fedlap_cov":
                shard.curvature(fit.weights, "exact", task.rng)
        for chunk in range(index if r % 2 else 1 - index, problem.chunks, 2):
            problem.score(Point(problem.start), chunk, warm + r)
    barrier.wait(600)


def floor(algo: str, data: Path, rounds: int, warm: int) -> float:
    """Seconds per round of two processes that only compute; set-up is not counted."""
    context = get_context("spawn")
    barrier = context.Barrier(3)
    children = [
        context.Process(target=half_of_the_work, args=(algo, data, i, rounds, warm, barrier))
        for i in range(2)
    ]
    for child in children:
        child.start()
    barrier.wait(120)
    began = time.monotonic()
    barrier.wait(600)
    seconds = (time.monotonic() - began) / rounds
    for child in children:
        child.join(30)
    return seconds


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
                floors.append(floor(algo, data, rounds, warm))
                ours.append(measured(algo, data, rounds, warm, Path(scratch) / f"{algo}-{i}"))
                ratios.append(ours[-1] / floors[-1])
            print(f"{algo}: floor {spread(floors, ' s')}, fedsim {spread(ours, ' s')}")
            print(f"{algo}: ratio {spread(ratios)}", flush=True)


if __name__ == "__main__":
    main()
