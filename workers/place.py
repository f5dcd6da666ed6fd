"""The place of a process: its machine, cores or GPU, and the engine that started it there.

The place is written to processes.json and the report, for information only. Facts and probe digests show
whether two processes compute the same bits (workers/numerics.py).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Annotated

import msgspec

Printable = Annotated[str, msgspec.Meta(max_length=500, pattern="^[ -~]*$")]
"""Text from a worker that is shown on the coordinator's terminal, without control characters."""
ENGINE = "FEDSIM_ENGINE"
"""Environment variable with the engine's name, for engines that set no variable in their processes."""
KNOWN = (
    ("SLURM_JOB_ID", "slurm job {}"),
    ("KUBERNETES_SERVICE_HOST", "kubernetes"),
    ("OMPI_COMM_WORLD_SIZE", "mpi"),
    ("TORCHELASTIC_RUN_ID", "torchrun"),
    ("PBS_JOBID", "pbs job {}"),
    ("LSB_JOBID", "lsf job {}"),
)
"""Environment variables that identify engines, each with the engine's name; {} is the variable's value."""


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a worker. node: the machine's name. device: the worker's cores, or its GPU's number on the
    machine. gpu: the GPU's UUID, '' without a GPU. engine: the engine that started it, '' if unknown."""

    node: Printable = ""
    device: Printable = ""
    gpu: Printable = ""
    engine: Printable = ""


def engine_of(environment: Mapping[str, str]) -> str:
    """Return the engine that started a process with this environment; '' if unknown."""
    if environment.get(ENGINE):
        return environment[ENGINE]
    known = (text.format(environment[name]) for name, text in KNOWN if environment.get(name))
    return next(known, "")


def place_of_process(device: str) -> Place:
    """Return the place of this process. device: the kind of device that it uses, cpu or cuda."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    on, gpu = f"cpu {cores}", ""
    if device == "cuda":
        import torch

        on = f"cuda:{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
        gpu = str(torch.cuda.get_device_properties(torch.device("cuda")).uuid)
    return Place(*(_printable(text) for text in (platform.node(), on, gpu, engine_of(os.environ))))


def _printable(text: str) -> str:
    return "".join(c for c in text if " " <= c <= "~")[:500]
