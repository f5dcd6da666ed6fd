"""A run as an engine sees it: its commands, and what they need of each machine. Each engine renders a Job."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedsim.errors import TaskError, UsageError
from launch.terminal import output_file
from workers.storage.atomic_files import disk_errors

SUBMIT_DEADLINE = 60.0
"""Seconds that an engine's own command may take."""
JOIN_WITHIN = 600
"""Seconds that the coordinator waits for an engine's workers, which start after it."""


@dataclass(frozen=True)
class Job:
    """A run on an engine.

    run: the run folder, on a file system that all machines share. tables: the tables of the run's config file
    (launch/configuration/config_files.py). nodes: the number of machines. workers: the number of worker
    processes on all machines. threads: cores per worker. gpus_per_worker: 0, a fraction of one GPU, or a
    whole number of GPUs. options: the engine's own options by name.
    """

    run: Path
    tables: Mapping[str, Mapping[str, Any]]
    nodes: int
    workers: int
    threads: int = 1
    gpus_per_worker: float = 0.0
    options: Mapping[str, str] = field(default_factory=dict)

    # ---- what each machine has

    @property
    def per_node(self) -> int:
        """Workers per machine."""
        if self.workers % self.nodes:
            raise UsageError(
                f"--workers {self.workers} on --nodes {self.nodes}: each node needs the same number"
            )
        return self.workers // self.nodes

    @property
    def cores(self) -> int:
        """Cores of one machine's workers."""
        return self.per_node * self.threads

    @property
    def gpus(self) -> int:
        """Whole GPUs that one machine's workers share."""
        return -(-round(self.per_node * self.gpus_per_worker * 1000) // 1000)

    # ---- what runs: words behind `fedsim`

    def coordinator(self, run: str, config: str, again: bool) -> list[str]:
        """Return the coordinator's command. again: resume a run that has begun. Add --bind."""
        how = ["resume", run] if again else ["launch", "--config", config, "--out", run]
        return [*how, "--remote-workers", str(self.workers), "--join-within", str(JOIN_WITHIN)]

    def start_or_resume(self, run: str, config: str) -> str:
        """Return a line of a shell that sets its arguments to the coordinator's command. Paths are quoted."""
        launch, resume = (" ".join(self.coordinator(run, config, again)) for again in (False, True))
        return f"if [ -e {run}/manifest.json ]; then set -- {resume}; else set -- {launch}; fi"

    def agent(self, join: str, seat: str) -> list[str]:
        """Return a node agent's command. join: its join file. seat: the number of its first worker."""
        workers = ["--workers", str(self.per_node), "--threads", str(self.threads)]
        return ["node", "--join", join, "--seat", seat, *workers]

    # ---- the files of the engine, beside the run

    @property
    def folder(self) -> Path:
        return self.run.with_name(f"{self.run.name}.job")

    @property
    def config(self) -> Path:
        return self.folder / "job.toml"

    def toml(self) -> str:
        """Return the tables as the text of a config file."""
        parts = [
            f"[{table}]\n" + "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in values.items())
            for table, values in self.tables.items()
            if values
        ]
        return "\n".join(parts)

    def write_config(self) -> None:
        write(self.config, self.toml())


def write(path: Path, text: str) -> None:
    """Write a file that an engine reads; create its folder if it is missing."""
    with disk_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with output_file(path) as file:
        file.write(text.encode())


def asked(command: Sequence[str], text: str = "") -> str:
    """Run an engine's own command with `text` as its input and return its output.

    Raises:
        TaskError: if the command fails or takes longer than SUBMIT_DEADLINE.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=SUBMIT_DEADLINE)
    except subprocess.TimeoutExpired:
        raise TaskError(f"{command[0]} has not answered within {SUBMIT_DEADLINE:g} s") from None
    if done.returncode:
        raise TaskError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Engine(Protocol):
    """A system that starts jobs on machines, such as Slurm or Kubernetes."""

    def plan(self, job: Job) -> str:
        """Return the job as text that the engine's own command reads."""

    def submit(self, job: Job) -> str:
        """Submit the job, or raise TaskError; return a message about the job and how to follow it."""
