"""Measures the CPU time of a client's part of a round, per algorithm, beside fedlap and fedavg.

    python -m tests.benchmarks.run_times [--repeats 5] [--epochs 10] [--tiny]

Two tasks with synthetic data. MNIST's shape: MLP 784-200-100-10, two clients of 600 examples, as each of a
hundred has. CIFAR-10's shape: the CNN of cnn_acar, one client of 256 examples; all costs grow with the
examples, so their ratio is that of 5,000. Batches of 64, one thread, one process, no evaluation, no files.
Time is CPU time of client_update and client_commit, because other programs use the machine; the server is
left out. Round 1 warms up; then the algorithms take turns, one round each.

`curvature` is the exact diagonal GGN alone, which fedlap_cov has once a round. The released code takes it of
the rows of all ten clients on CIFAR-10: the last line adds nine more to fedlap_cov's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedsim.data import Dataset
from fedsim.experiment import Experiment, build_algorithm, resolved_hyperparameters
from fedsim.problem import Problem
from protocols import find
from tests.benchmarks.common import options_of, spread
from tests.support.harness import carried
from workers.assembly import fix_numerics

CANDIDATES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedprox": ("fedprox", {}),
    "feddyn": ("feddyn", {}),
    "fedlap": ("fedlap", {}),
    "fedlap_cov": ("fedlap_cov", {}),
    "fedlap_cov, top2_sign": ("fedlap_cov", {"curvature": "top2_sign"}),
    "fedlap_cov, sign": ("fedlap_cov", {"curvature": "sign"}),
    "ivon_admm": ("ivon_admm", {"lr": 1e-5, "delta": 100.0}),
}
"""Algorithm and settings by the name that is printed. A few clients with few examples are not what the
defaults of ivon_admm were chosen for: a small step and a strong prior keep it stable."""


@dataclass(frozen=True)
class Task:
    name: str
    data: str
    model: str
    clients: int
    rows: int
    released: int
    """Clients whose rows the released code takes the curvature of."""


TASKS = (
    Task("MLP, MNIST's shape", "mnist_shaped", "mlp", 2, 600, 1),
    Task("cnn_acar, CIFAR-10's shape", "cifar_shaped", "cnn_acar", 1, 256, 10),
)


def mnist_shaped() -> Dataset:
    return images((1, 28, 28))


def cifar_shaped() -> Dataset:
    return images((3, 32, 32))


def images(shape: tuple[int, ...], count: int = 1200) -> Dataset:
    """A random image per class, half hidden by noise."""
    rng = np.random.Generator(np.random.Philox(key=1))
    labels = np.arange(count, dtype=np.int64) % 10
    pixels = rng.integers(0, 128, (10, *shape), dtype=np.uint8)[labels]
    pixels += rng.integers(0, 128, pixels.shape, dtype=np.uint8)
    return Dataset("images", pixels, labels, pixels[:10], labels[:10], classes=10, scale=255.0)


class Rounds:
    """An algorithm that is played round by round, without a coordinator."""

    def __init__(self, task: Task, algo: str, settings: Mapping[str, Any], epochs: int, batch: int) -> None:
        sizes = {"epochs": epochs, "batch_size": batch}
        names = [(key, key.rpartition(".")[2]) for key in resolved_hyperparameters(find(algo)())]
        hyperparameters = {key: sizes[name] for key, name in names if name in sizes}
        algorithm = build_algorithm(find(algo), hyperparameters | dict(settings))
        experiment = Experiment(
            algo=algo,
            dataset=f"{__file__}:{task.data}",
            inputs="scaled",
            partition="iid",
            fraction=task.clients * task.rows / 1200,
            clients=task.clients,
            model=task.model,
        )
        self.problem = problem = Problem.build(experiment, algorithm, None)
        context = problem.context(0, 0)
        self.server = algorithm.server_init(context)
        self.clients = [algorithm.client_init(context, k) for k in range(task.clients)]
        self.round = 0

    def play(self) -> float:
        """One round; the CPU seconds per client."""
        self.round += 1
        problem, algorithm, folds = self.problem, self.problem.algorithm, self.round - 1
        context = problem.context(self.round, 1, folds, len(self.clients))
        down = carried(algorithm.broadcast(self.server, context), problem, "down")
        ups, seconds = [], 0.0
        for k, client in enumerate(self.clients):
            task, shard = problem.task(self.round, 1, k, folds, len(self.clients)), problem.shard(k)
            (draft, up), update = timed(algorithm.client_update, client, down, shard, task)
            seen = carried(up, problem, "up", down)
            self.clients[k], commit = timed(algorithm.client_commit, draft, down, seen, task)
            ups.append((k, seen))
            seconds += update + commit
        self.server = algorithm.server_update(self.server, down, iter(ups), context)
        return seconds / len(self.clients)

    def curvature(self) -> float:
        """CPU seconds of the exact diagonal GGN of one client's rows."""
        weights, rng = self.problem.start, self.problem.task(1, 1, 0).rng
        return timed(self.problem.shard(0).curvature, weights, "exact", rng)[1]


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result of a call and the CPU seconds of this process."""
    began = time.process_time()
    result = call(*arguments)
    return result, time.process_time() - began


def measure(task: Task, epochs: int, batch: int, repeats: int) -> Iterator[str]:
    """The lines of one task."""
    rounds = {name: Rounds(task, *choice, epochs, batch) for name, choice in CANDIDATES.items()}
    spent: dict[str, list[float]] = {name: [] for name in (*rounds, "curvature")}
    for repeat in range(repeats + 1):
        for name in spent:
            measured = rounds[name].play() if name in rounds else rounds["fedlap_cov"].curvature()
            if repeat:  # the first one warms up
                spent[name].append(measured)
    extra = task.released - 1
    if extra:
        pairs = zip(spent["fedlap_cov"], spent["curvature"], strict=True)
        spent[f"fedlap_cov, curvature of {task.released} clients"] = [a + extra * b for a, b in pairs]
    for name, seconds in spent.items():
        ratios = [
            spread([a / b for a, b in zip(seconds, spent[other], strict=True)], digits=2)
            for other in ("fedlap", "fedavg")
        ]
        yield f"{task.name} | {name} | {spread(seconds, ' s')} | {ratios[0]} | {ratios[1]}"


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    repeats, epochs = (1, 1) if options.tiny else (options.repeats, options.epochs)
    fix_numerics(1, "cpu")
    print("task | algorithm | CPU time per client and round | / fedlap | / fedavg")
    for task in TASKS:
        if options.tiny:
            task = replace(task, rows=32)
        for line in measure(task, epochs, 16 if options.tiny else 64, repeats):
            print(line, flush=True)


if __name__ == "__main__":
    main()
