"""The place of a process: its machine, cores or GPU, and the engine that started it there.

It goes into processes.json and the report. Nothing is decided by it: bits are compared by facts and probe
digest (workers/numerics.py).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Annotated

import msgspec

Printable = Annotated[str, msgspec.Meta(max_length=500, pattern="^[ -~]*$")]
"""Text of a worker that is shown on the coordinator's terminal: it has no control characters."""
ENGINE = "FEDSIM_ENGINE"
"""Set by an engine that sets no variable of its own for what it starts."""
KNOWN = (
    ("SLURM_JOB_ID", "slurm job {}"),
    ("KUBERNETES_SERVICE_HOST", "kubernetes"),
    ("OMPI_COMM_WORLD_SIZE", "mpi"),
    ("TORCHELASTIC_RUN_ID", "torchrun"),
    ("PBS_JOBID", "pbs job {}"),
    ("LSB_JOBID", "lsf job {}"),
)
"""Variables by which engines are known, and what is said of them with the variable's value."""


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a worker. node: its machine's name. device: its cores, or its GPU's number there. gpu:
    that GPU's UUID, '' for none. engine: what has placed it there, '' if none is known."""

    node: Printable = ""
    device: Printable = ""
    gpu: Printable = ""
    engine: Printable = ""


def engine_of(environment: Mapping[str, str]) -> str:
    """The engine that has started a process with this environment; '' if none is known."""
    if environment.get(ENGINE):
        return environment[ENGINE]
    known = (text.format(environment[name]) for name, text in KNOWN if environment.get(name))
    return next(known, "")


def place_of_process(device: str) -> Place:
    """The place of this process. device: the kind that it computes on, cpu or cuda."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    on, gpu = f"cpu {cores}", ""
    if device == "cuda":
        import torch

        on = f"cuda:{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
        gpu = str(torch.cuda.get_device_properties(torch.device("cuda")).uuid)
    return Place(*(_printable(text) for text in (platform.node(), on, gpu, engine_of(os.environ))))


def _printable(text: str) -> str:
    return "".join(c for c in text if " " <= c <= "~")[:500]
