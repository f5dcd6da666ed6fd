"""`fedsim sweep --on ENGINE`: each run is an element of a job array (Slurm) or a task (Ray).

Each run of a sweep is one process, so the engine only has to place it. All machines share the folder of runs.
It is the same as after a sweep on one machine, so either kind of sweep can continue the other.

References:
    https://slurm.schedmd.com/job_array.html
    https://docs.ray.io/en/latest/ray-core/fault_tolerance/tasks.html (a task whose node is lost runs again)
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsim.errors import Interrupted, UsageError
from launch.engines.options import EngineOptions
from launch.engines.ray import connected
from launch.engines.slurm import check_slurm, directives, no_pattern, submit_script
from launch.sweep.runner import Progress
from launch.sweep.task import Tasks, run_task

LOOK = 0.5
"""Seconds between two updates of the tasks' progress."""
RETRIES = 20
"""Restarts of a task whose node was lost."""

SCRIPT = """#!/bin/bash
{directives}
exec {python} -m launch.sweep.task {file} "$SLURM_ARRAY_TASK_ID"
"""


def array_script(tasks: Tasks, engine: EngineOptions, file: Path, jobs: int | None) -> str:
    """Return the batch script of an array with one element per run, at most `jobs` of them at a time."""
    at_once = f"%{jobs}" if jobs else ""
    own = [
        f"job-name=fedsim-{file.stem}",
        f"array=0-{len(tasks.tasks) - 1}{at_once}",
        f"cpus-per-task={_threads(tasks)}",
        *([f"gres=gpu:{math.ceil(engine.gpus_per_worker)}"] if engine.gpus_per_worker else []),
        f"output={no_pattern(file.with_suffix(''))}-%a.log",
        "open-mode=append",
        "requeue",
        *engine.options,
    ]
    return SCRIPT.format(
        directives=directives(own), python=shlex.quote(sys.executable), file=shlex.quote(str(file))
    )


def submit_array(tasks: Tasks, engine: EngineOptions, file: Path, jobs: int | None) -> str:
    """Submit the array and return a message. The same command with --no-run writes the tables later."""
    script = array_script(tasks, engine, file, jobs)
    check_slurm()
    tasks.write(file)
    number = submit_script(script, file.with_suffix(".sh"))
    what = f"job {number}: {len(tasks.tasks)} runs, which leave their output beside {file}"
    return f"{what}; once they are done, --no-run instead of --on shows the tables"


def run_on_ray(
    tasks: Tasks, engine: EngineOptions, jobs: int | None, watch: Callable[[Progress], None]
) -> dict[str, str]:
    """Compute the runs as tasks; return errors by trial id.

    engine: its option address names the cluster, and gpus_per_worker is the number of GPUs of each run. jobs:
    the maximum number of runs at a time; None for as many as fit on the cluster. watch: called with the
    progress. Ctrl-C raises Interrupted; runs that have not ended count as not run.
    """
    ray = connected(engine.options)
    count = len(tasks.tasks)
    progress, errors = Progress(count, side_by_side=jobs or 1), {}
    try:
        one = ray.remote(run_task).options(
            num_cpus=_threads(tasks),
            num_gpus=engine.gpus_per_worker,
            max_retries=RETRIES,
            runtime_env={"env_vars": dict(tasks.environment())},
        )
        described = ray.put(tasks)
        waiting, running = list(range(count)), dict[Any, tuple[int, float]]()
        while waiting or running:
            while waiting and len(running) < (jobs or count):
                number = waiting.pop(0)
                running[one.remote(described, number, True)] = number, time.monotonic()
            ended, _ = ray.wait([*running], num_returns=len(running), timeout=LOOK)
            for future in ended:
                number, began = running.pop(future)
                error = _outcome(ray, future)
                if error:
                    errors[tasks.tasks[number].id] = error
                progress.failed, progress.done = len(errors), progress.done + (not error)
                progress.seconds += time.monotonic() - began
            watch(progress)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {progress.done} runs are done and kept in {tasks.pool}") from None
    finally:
        ray.shutdown()
    return errors


def _outcome(ray: Any, future: Any) -> str:
    try:
        return str(ray.get(future))
    except ray.exceptions.RayError as e:
        return f"Ray gave the task up: {type(e).__name__}"


def _threads(tasks: Tasks) -> int:
    """Return the number of cores for every run, which is the largest number of threads of any run."""
    if not tasks.tasks:
        raise UsageError("no runs are to be done")
    return max(int(task.experiment["threads"]) for task in tasks.tasks)
