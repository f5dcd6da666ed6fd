"""One run of a sweep on a machine that an engine has chosen: `python -m launch.sweep.task FILE NUMBER`.

The machine shares the pool's folder. The process locks the run there, so that no other machine computes it,
and writes the same run folder as a sweep on one machine. An unfinished run is resumed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from fedsim.errors import FedsimError, UsageError
from fedsim.experiment import Experiment, convert
from launch.configuration.execution import Execution
from launch.engines.job import write
from launch.processes.fork_server import ENVIRONMENT
from launch.sweep.pool import Pool
from launch.sweep.recipe import Trial, one_numerics
from workers.portable import environment_for

LOOK = 0.5
"""Seconds between two attempts to take another process's lock, which the kernel frees when that ends."""


class Task(msgspec.Struct, frozen=True):
    """A run. `id` is its Trial.id, and `name` is for messages."""

    id: str
    name: str
    experiment: dict[str, Any]


class Tasks(msgspec.Struct, frozen=True):
    """The missing runs of a sweep. `pool` is their folder, and `keeps_states` is as in Pool."""

    pool: str
    execution: dict[str, Any]
    tasks: tuple[Task, ...]
    keeps_states: bool = True

    @staticmethod
    def of(trials: Sequence[Trial], execution: Execution, pool: Pool) -> Tasks:
        """Return the runs that the pool does not have, without duplicates."""
        missing = {trial.id: trial for trial in trials if not pool.done(trial)}.values()
        tasks = tuple(Task(t.id, t.name, asdict(t.experiment)) for t in missing)
        return Tasks(str(pool.path.resolve()), asdict(execution), tasks, pool.keeps_states)

    @property
    def threads(self) -> int:
        """Cores for every run: the largest number of threads of any run."""
        if not self.tasks:
            raise UsageError("no runs are to be done")
        return max(int(task.experiment["threads"]) for task in self.tasks)

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables to set before torch is imported."""
        numerics = one_numerics({t.experiment["numerics"] for t in self.tasks})
        return {**ENVIRONMENT, **environment_for(numerics)}

    def write(self, path: Path) -> None:
        write(path, msgspec.json.format(msgspec.json.encode(self)).decode())


def run_task(tasks: Tasks, number: int) -> str:
    """Compute one run; return its error, or ''."""
    from launch.sweep.runner import leave_summary, start_or_resume

    task, pool = tasks.tasks[number], Pool(Path(tasks.pool), tasks.keeps_states)
    while (claim := pool.claim(task)) is None:
        time.sleep(LOOK)
    try:
        if pool.done(task):
            return ""
        began, folder = time.monotonic(), pool.folder(task)
        try:
            experiment = convert(Experiment, task.experiment, "a sweep's experiment")
            execution = convert(Execution, tasks.execution, "a sweep's execution")
            start_or_resume(experiment, replace(execution, out=str(folder)), pool.begun(task))
        except FedsimError as e:
            leave_summary(folder, str(e))
            return f"{task.name}: {e}"
        pool.sign(task, time.monotonic() - began)
        return ""
    finally:
        pool.release(task, claim)  # not earlier: a run is not done until it is signed


if __name__ == "__main__":
    tasks, number = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Tasks), int(sys.argv[2])
    os.environ.update(tasks.environment())
    error = run_task(tasks, number)
    print(error or tasks.tasks[number].name, flush=True)
    sys.exit(bool(error))
