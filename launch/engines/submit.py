"""Create a job from the options of `fedsim launch --on ENGINE`, and submit it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fedsim.errors import UsageError
from launch.configuration.config import Overrides
from launch.configuration.execution import AUTO
from launch.engines.job import Engine, Job
from launch.engines.kubernetes import Kubernetes
from launch.engines.options import EngineOptions
from launch.engines.ray import Ray
from launch.engines.slurm import Slurm
from launch.runs.writer import RunDir

ENGINES: Mapping[str, Callable[[], Engine]] = {"slurm": Slurm, "ray": Ray, "kubernetes": Kubernetes}
OWN = ("workers", "out", "runs", "remote_workers", "bind", "keys", "transport", "join_within")
"""Keys of [execution] that the engine's job sets."""


def submit(overrides: Overrides, engine: EngineOptions) -> str:
    """Submit a run and return a message; with dry_run, submit nothing and return the job as text."""
    job, carried = _job(overrides, engine), ENGINES[engine.on]()
    return carried.plan(job) if engine.dry_run else carried.submit(job)


def _job(overrides: Overrides, engine: EngineOptions) -> Job:
    tcp = replace(overrides, execution={**overrides.execution, "transport": "tcp"})
    experiment, execution = tcp.resolve(here=False)
    if clashing := [name for name in ("remote_workers", "bind", "keys") if name in overrides.execution]:
        option = clashing[0].replace("_", "-")
        raise UsageError(f"--{option} does not go with --on {engine.on}: its workers find their coordinator")
    if execution.workers == AUTO:
        raise UsageError(f"--workers auto looks at this machine; on {engine.on} give a number")
    if not execution.workers:
        raise UsageError(f"--workers 0 computes in one process; on {engine.on} there are workers")
    out = RunDir.path_of(experiment, execution)
    kept = {key: value for key, value in overrides.execution.items() if key not in OWN}
    if kept.get("data_dir"):
        kept["data_dir"] = str(Path(str(kept["data_dir"])).resolve())
    if engine.gpus_per_worker:
        kept.setdefault("devices", "cuda")
    tables = {
        "experiment": overrides.experiment,
        "hyperparameters": overrides.hyperparameters,
        "codecs": overrides.codecs,
        "execution": kept,
    }
    run, threads, gpus = out.resolve(), experiment.threads, engine.gpus_per_worker
    return Job(run, tables, engine.nodes, execution.workers, threads, gpus, engine.pairs)
