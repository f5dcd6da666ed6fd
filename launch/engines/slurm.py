"""Slurm: `fedsim launch --on slurm` is one batch job, and `fedsim sweep --on slurm` an array of them.

The coordinator runs in the batch step, on the first node of the allocation: no process stays on a login node,
and no connection comes from outside. Every node runs a step with a node agent; a killed step is restarted.
Slurm sends SIGTERM before the time limit or when it pre-empts the job. The coordinator then commits and ends
with exit code 130, and the job requeues itself. The restarted job resumes the run, as it does after kill -9.

References:
    https://slurm.schedmd.com/sbatch.html (--requeue, --signal)
    https://slurm.schedmd.com/srun.html (--overlap, --nodelist)
    https://slurm.schedmd.com/job_array.html
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fedsim.errors import UsageError
from launch.engines.job import Job, asked, write
from launch.engines.options import EngineOptions
from launch.sweep.task import Tasks

NOTICE = 90
"""Seconds between SIGTERM and the end of the time limit; a commit takes less than a second."""
INHERITED = ("CPUS_PER_TASK", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "NTASKS_PER_NODE", "TRES_PER_TASK")
"""Variables SLURM_* of the batch step that srun would use as options of the node agents' steps."""
PYTHON = shlex.quote(sys.executable)

SCRIPT = """#!/bin/bash
{directives}
set -u
run={run}
fedsim=({python} -m launch)
unset {inherited}
own_address='from launch.configuration.listen_address import own_address'
address=$({python} -c "$own_address; print(own_address() or '127.0.0.1')")
rm -f "$run/join.json"  # its keys open nothing any more
{start_or_resume}
asked=0
"${{fedsim[@]}}" "$@" --bind "tcp://$address:*" &
coordinator=$!
trap 'asked=1; kill -TERM "$coordinator"' TERM
until [ -e "$run/join.json" ]; do
    kill -0 "$coordinator" 2>/dev/null || break
    sleep 0.1
done
agent() {{  # on node $1, with {per_node} seats from $2 on; a killed step is started again, three times
    for attempt in 0 1 2 3; do
        kill -0 "$coordinator" 2>/dev/null || return
        srun --nodes=1 --ntasks=1 --nodelist="$1" --cpus-per-task={cores}{gres} --overlap \\
            "${{fedsim[@]}}" {agent} --logs {logs}
        case $? in 0 | 2 | 4 | 130) return ;; esac  # the run is over, or the agent of no use
    done
}}
if [ -e "$run/join.json" ]; then
    seat=0
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        agent "$node" "$seat" &
        seat=$((seat + {per_node}))
    done
fi
wait "$coordinator"; code=$?
[ "$asked" = 1 ] && {{ wait "$coordinator"; code=$?; }}  # the first wait was ended by the signal
wait  # the node agents end with the run
if [ "$asked" = 1 ] && [ "$code" = 130 ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # until Slurm ends this script
fi
exit "$code"
"""
ARRAY = """#!/bin/bash
{directives}
exec {python} -m launch.sweep.task {file} "$SLURM_ARRAY_TASK_ID"
"""


class Slurm:
    """An Engine for Slurm. Its options are those of sbatch, such as partition=gpu and time=2:00:00."""

    def plan(self, job: Job) -> str:
        own = [
            f"nodes={job.nodes}",
            "ntasks-per-node=1",
            "no-kill",  # a failed node ends only its own step
            f"signal=B:TERM@{NOTICE}",
        ]
        log, options = job.folder / "job", [f"{k}={v}" if v else k for k, v in job.options.items()]
        return SCRIPT.format(
            directives=_directives(job.run.name, job.cores, job.gpus, f"{_plain(log)}.log", own, options),
            run=shlex.quote(str(job.run)),
            python=PYTHON,
            inherited=" ".join(f"SLURM_{name}" for name in INHERITED),
            start_or_resume=job.start_or_resume('"$run"', shlex.quote(str(job.config))),
            cores=job.cores,
            gres=f" --gres=gpu:{job.gpus}" if job.gpus else "",
            agent=" ".join(job.agent('"$run/join.json"', '"$2"')),
            per_node=job.per_node,
            logs=shlex.quote(str(job.folder)),
        )

    def submit(self, job: Job) -> str:
        script = self.plan(job)
        _check()
        job.write_config()
        number = _submitted(script, job.folder / "job.sh")
        return f"job {number}: {job.folder / 'job.log'} has its output, {job.run} its run folder"


def array_script(tasks: Tasks, engine: EngineOptions, file: Path, jobs: int | None) -> str:
    """Return the batch script of an array with one element per run, at most `jobs` of them at a time."""
    array = [f"array=0-{len(tasks.tasks) - 1}" + (f"%{jobs}" if jobs else "")]
    log, gpus = f"{_plain(file.with_suffix(''))}-%a.log", math.ceil(engine.gpus_per_worker)
    directives = _directives(file.stem, tasks.threads, gpus, log, array, engine.options)
    return ARRAY.format(directives=directives, python=PYTHON, file=shlex.quote(str(file)))


def submit_array(tasks: Tasks, engine: EngineOptions, file: Path, jobs: int | None) -> str:
    """Submit the runs of a sweep and return a message. Later, --no-run in place of --on writes the tables."""
    script = array_script(tasks, engine, file, jobs)
    _check()
    tasks.write(file)
    number = _submitted(script, file.with_suffix(".sh"))
    what = f"job {number}: {len(tasks.tasks)} runs, which leave their output beside {file}"
    return f"{what}; once they are done, --no-run instead of --on shows the tables"


def _directives(
    name: str, cores: int, gpus: int, log: str, own: Sequence[str], options: Sequence[str]
) -> str:
    """Return the lines of a batch script that set options of sbatch, each NAME=VALUE or NAME. The user's
    options come last, because sbatch uses the last value."""
    common = [f"job-name=fedsim-{name}", f"cpus-per-task={cores}", *([f"gres=gpu:{gpus}"] if gpus else [])]
    common += [f"output={log}", "open-mode=append", "requeue"]
    return "\n".join(map(_directive, [*common, *own, *options]))


def _directive(option: str) -> str:
    """Return the line of one option; refuse an option that contains a line break.

    sbatch ends a value at a space and at a #, unless the value is in quotes. In and outside quotes, sbatch
    drops a backslash and takes the next character as it is.
    """
    name, equals, value = option.partition("=")
    if "\n" in option:
        raise UsageError(
            f"--engine-option or --out: {name!r} of sbatch is one line; leave out its line break"
        )
    if re.search(r"""[\s#"'\\]""", value):
        value = '"{}"'.format(re.sub(r'(["\\])', r"\\\1", value))
    return f"#SBATCH --{name}{equals}{value}"


def _plain(path: Path) -> str:
    """Return a path for --output, in which sbatch replaces %j and the like."""
    return str(path).replace("%", "%%")


def _check() -> None:
    """Raise UsageError if there is no sbatch. Call this before anything is written."""
    if shutil.which("sbatch") is None:
        raise UsageError("--on slurm: there is no sbatch on this machine; --dry-run prints the script")


def _submitted(script: str, path: Path) -> str:
    """Write a batch script and submit it with sbatch; return the job's number."""
    write(path, script)
    return asked(["sbatch", "--parsable", str(path)]).strip().partition(";")[0]
