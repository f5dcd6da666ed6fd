"""The floor of a round: processes that only train, take the curvature and evaluate; two, if nothing is said.

They exchange no messages and write no files.
"""

from __future__ import annotations

import os
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.gaussian import Point
from fedsim.learning.solvers.first_order import minimise
from fedsim.problem import Problem
from launch.processes.fork_server import ENVIRONMENT
from protocols import find
from workers.assembly import fix_numerics
from workers.heap import set_malloc_thresholds

DEADLINE = 900.0


def share_of_the_work(
    experiment: Experiment, data: Path | None, index: int, of: int, warm: int, device: str, end: Barrier
) -> None:
    """Process `index` of `of`: its clients' training and its pieces of the evaluation, in every round, after
    `warm` rounds that are not counted."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index % os.cpu_count()]})  # type: ignore[operator]
    fix_numerics(1, device)
    set_malloc_thresholds()
    algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
    problem = Problem.build(experiment, algorithm, data, device)
    for r in range(-warm, experiment.rounds):
        if not r:
            end.wait(DEADLINE)
        for k in range(index, experiment.clients, of):
            task = problem.task(warm + r, 1, k)
            shard = problem.shard(k)
            fit = minimise(shard, task.start, how=algorithm.local, rng=task.rng, round=1)  # type: ignore[attr-defined]
            if experiment.algo == "fedlap_cov":
                shard.curvature(fit.weights, "exact", task.rng)
        for chunk in range(index if r % 2 else of - 1 - index, problem.evaluation.chunks, of):
            problem.evaluation.score(Point(problem.start), chunk, warm + r)
    end.wait(DEADLINE)


def floor(
    experiment: Experiment, data: Path | None, warm: int, processes: int = 2, device: str = "cpu"
) -> float:
    """Seconds per round of processes that only compute, with the settings of a worker; set-up is not
    counted."""
    os.environ.update(ENVIRONMENT)
    context = get_context("spawn")
    barrier = context.Barrier(processes + 1)
    children = [
        context.Process(
            target=share_of_the_work, args=(experiment, data, i, processes, warm, device, barrier)
        )
        for i in range(processes)
    ]
    for child in children:
        child.start()
    barrier.wait(DEADLINE)
    began = time.monotonic()
    barrier.wait(DEADLINE)
    seconds = (time.monotonic() - began) / experiment.rounds
    for child in children:
        child.join(30)
    return seconds
