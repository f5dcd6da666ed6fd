"""One run of a sweep on a machine that an engine has chosen: `python -m launch.sweep.task FILE NUMBER`.

The machine shares the pool's folder. The process locks the run there, so that no other machine computes it,
and writes the same run folder as a sweep on one machine. An unfinished run is resumed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fedsim.errors import Interrupted, UsageError
from launch.configuration.execution import Execution
from launch.engines.job import write
from launch.sweep.pool import Pool
from launch.sweep.recipe import Task
from launch.sweep.runner import run_trials


class Tasks(msgspec.Struct, frozen=True):
    """The missing runs of a sweep. `pool` is their folder, and `keeps_states` is as in Pool."""

    pool: str
    execution: Execution
    tasks: tuple[Task, ...]
    keeps_states: bool = True

    @staticmethod
    def of(trials: Sequence[Task], execution: Execution, pool: Pool) -> Tasks:
        """Return the runs that the pool does not have, without duplicates."""
        missing = {trial.id: trial for trial in trials if not pool.done(trial)}.values()
        tasks = tuple(Task(t.id, t.name, t.experiment) for t in missing)
        return Tasks(str(pool.path.resolve()), execution, tasks, pool.keeps_states)

    @property
    def threads(self) -> int:
        """Cores for every run: the largest number of threads of any run."""
        if not self.tasks:
            raise UsageError("no runs are to be done")
        return max(task.experiment.threads for task in self.tasks)

    def write(self, path: Path) -> None:
        write(path, msgspec.json.format(msgspec.json.encode(self)).decode())


def main(file: str, number: str) -> int:
    """Compute one run of a file of tasks; return the exit code. SIGTERM stops the run after a round: an
    engine sends it to all processes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    tasks = msgspec.json.decode(Path(file).read_bytes(), type=Tasks)
    task, pool = tasks.tasks[int(number)], Pool(Path(tasks.pool), tasks.keeps_states)
    try:
        errors = run_trials([task], tasks.execution, pool, 1, lambda progress: None)
    except Interrupted as e:
        print(f"{task.name}: {e}", flush=True)
        return e.exit_code
    print(f"{task.name}: {errors[task.id]}" if errors else task.name, flush=True)
    return len(errors)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
