"""`fedsim launch --on slurm`: one batch job with the coordinator and the node agents.

The coordinator runs in the batch step, on the first node of the allocation: no process stays on a login node,
and no connection comes from outside. Every node runs a step with a node agent; a killed step is restarted.
Slurm sends SIGTERM before the time limit or when it pre-empts the job. The coordinator then commits and ends
with exit code 130, and the job requeues itself. The restarted job resumes the run, as it does after kill -9.

References:
    https://slurm.schedmd.com/sbatch.html (--requeue, --signal)
    https://slurm.schedmd.com/srun.html (--overlap, --nodelist)
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedsim.errors import UsageError
from launch.engines.job import JOIN_WITHIN, Job, asked, write

NOTICE = 90
"""Seconds between SIGTERM and the end of the time limit; a commit takes less than a second."""
INHERITED = ("CPUS_PER_TASK", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "NTASKS_PER_NODE", "TRES_PER_TASK")
"""Variables SLURM_* of the batch step that srun would use as options of the node agents' steps."""

SCRIPT = """#!/bin/bash
{directives}
set -u
run={run}
fedsim=({python} -m launch)
unset {inherited}
own_address='from launch.configuration.listen_address import own_address'
address=$({python} -c "$own_address; print(own_address() or '127.0.0.1')")
rm -f "$run/join.json"  # its keys open nothing any more
if [ -e "$run/manifest.json" ]; then how=(resume "$run"); else how=(launch --config {config} --out "$run"); fi
asked=0
"${{fedsim[@]}}" "${{how[@]}}" --remote-workers {workers} --bind "tcp://$address:*" --join-within {within} &
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
            "${{fedsim[@]}}" node --join "$run/join.json" --workers {per_node} --threads {threads} \\
            --seat "$2" --logs {logs}
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


class Slurm:
    """An Engine for Slurm. Its options are those of sbatch, such as partition=gpu and time=2:00:00."""

    def plan(self, job: Job) -> str:
        cores = job.per_node * job.threads
        gpus = job.gpus_per_node
        return SCRIPT.format(
            directives=directives(self._options(job, cores)),
            run=shlex.quote(str(job.run)),
            python=shlex.quote(sys.executable),
            inherited=" ".join(f"SLURM_{name}" for name in INHERITED),
            config=shlex.quote(str(job.config)),
            workers=job.workers,
            within=JOIN_WITHIN,
            cores=cores,
            gres=f" --gres=gpu:{gpus}" if gpus else "",
            per_node=job.per_node,
            threads=job.threads,
            logs=shlex.quote(str(job.folder)),
        )

    def _options(self, job: Job, cores: int) -> Iterator[str]:
        """Yield options of sbatch. The user's options come last, because sbatch uses the last value."""
        yield f"job-name=fedsim-{job.run.name}"
        yield f"nodes={job.nodes}"
        yield "ntasks-per-node=1"
        yield f"cpus-per-task={cores}"
        if job.gpus_per_node:
            yield f"gres=gpu:{job.gpus_per_node}"
        yield f"output={no_pattern(job.folder / 'job.log')}"
        yield "open-mode=append"
        yield "requeue"
        yield "no-kill"  # a failed node ends only its own step
        yield f"signal=B:TERM@{NOTICE}"
        for name, value in (job.options or {}).items():
            yield f"{name}={value}" if value else name

    def submit(self, job: Job) -> str:
        script = self.plan(job)
        check_slurm()
        job.write_config()
        number = submit_script(script, job.folder / "job.sh")
        return f"job {number}: {job.folder / 'job.log'} has its output, {job.run} its run folder"


def directives(options: Iterable[str]) -> str:
    """Return options of sbatch, NAME=VALUE or NAME, as the lines of a batch script that set them."""
    return "\n".join(map(_directive, options))


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


def no_pattern(path: Path) -> str:
    """Return a path for --output, in which sbatch replaces %j and the like."""
    return str(path).replace("%", "%%")


def check_slurm() -> None:
    """Raise UsageError if there is no sbatch. Call this before anything is written."""
    if shutil.which("sbatch") is None:
        raise UsageError("--on slurm: there is no sbatch on this machine; --dry-run prints the script")


def submit_script(script: str, path: Path) -> str:
    """Write a batch script and submit it with sbatch; return the job's number."""
    write(path, script)
    return asked(["sbatch", "--parsable", str(path)]).strip().partition(";")[0]
