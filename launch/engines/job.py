"""A job for an engine, and the protocol of an engine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedsim.errors import TaskError, UsageError
from workers.storage.atomic_files import disk_errors

SUBMIT_DEADLINE = 60.0
"""Seconds for an engine's own command."""
JOIN_WITHIN = 600
"""Seconds for an engine's workers to come; they are started after the coordinator."""


@dataclass(frozen=True)
class Job:
    """A run on an engine.

    run: the run folder, on a file system that all machines share. tables: what a config file of the run holds
    (launch/configuration/config_files.py). nodes: machines. workers: worker processes in all. threads: cores
    for each.
    gpus_per_worker: 0 for none; a share of one, or whole ones. options: of the engine's own, by name.
    """

    run: Path
    tables: Mapping[str, Mapping[str, Any]]
    nodes: int
    workers: int
    threads: int = 1
    gpus_per_worker: float = 0.0
    options: Mapping[str, str] | None = None

    @property
    def per_node(self) -> int:
        """Workers of one machine."""
        if self.workers % self.nodes:
            raise UsageError(f"--workers {self.workers} on --nodes {self.nodes}: give every node as many")
        return self.workers // self.nodes

    @property
    def gpus_per_node(self) -> int:
        """Whole GPUs that one machine's workers share."""
        return -(-round(self.per_node * self.gpus_per_worker * 1000) // 1000)

    @property
    def folder(self) -> Path:
        """The folder of the engine's files, beside the run."""
        return self.run.with_name(f"{self.run.name}.job")

    @property
    def config(self) -> Path:
        return self.folder / "job.toml"

    def toml(self) -> str:
        """The tables as a config file."""
        parts = [
            f"[{table}]\n" + "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in values.items())
            for table, values in self.tables.items()
            if values
        ]
        return "\n".join(parts)

    def write_config(self) -> None:
        write(self.config, self.toml())


def write(path: Path, text: str) -> None:
    """Write a file that an engine reads, and the folder around it."""
    with disk_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def asked(command: Sequence[str], text: str = "") -> str:
    """The output of an engine's own command, which reads `text`; TaskError if it fails or is too slow."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=SUBMIT_DEADLINE)
    except subprocess.TimeoutExpired:
        raise TaskError(f"{command[0]} has not answered within {SUBMIT_DEADLINE:g} s") from None
    if done.returncode:
        raise TaskError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Engine(Protocol):
    """A system that has machines."""

    def plan(self, job: Job) -> str:
        """Return the job as text that the engine's own command takes."""

    def submit(self, job: Job) -> str:
        """Submit the job, or raise TaskError; returns a line on what was submitted and how to follow it."""
