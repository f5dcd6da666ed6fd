"""Describe the numerics of a process, on which the bits of its results depend, and compare two processes.

Registration compares a worker with the coordinator; resume and verify compare this process with
the one that started the run. All use `differences`. Facts are texts by name: versions, torch's instruction
set and settings, the GPU, and the probe digest (workers/probe.py), which detects differences that the other
facts do not show. A fact that only one side knows is not compared: a coordinator without a GPU takes the
GPU's digest from the first worker.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

Facts = Mapping[str, str]

COMPUTES = ("torch", "numpy")
"""The libraries that compute results; other libraries only move numbers."""
HERE = ("python", *COMPUTES, "machine", "processor")
"""Names of facts that are the same in every process of this program on this machine."""
PROBE = "probe digest ({})"
"""The name of the fact with the probe digest on a kind of device."""
CUDA_GRAPHS = "FEDSIM_CUDA_GRAPHS"
"""Environment variable: if it is 0, workers on GPUs do not record training steps."""
DRIFT = "this run's bits depend on who computed what"


class Difference(NamedTuple):
    """One fact that differs. there: the other side's value; here: this side's."""

    name: str
    there: str
    here: str

    def __str__(self) -> str:
        return f"{self.name} {self.there} instead of {self.here}"


def facts_of_machine() -> dict[str, str]:
    """Return versions, the machine, and torch's instruction set, which ATEN_CPU_CAPABILITY may lower."""
    import torch

    return {
        "python": platform.python_version(),
        **{name: version(name) for name in COMPUTES},
        "machine": platform.machine(),
        "processor": str(torch.backends.cpu.get_cpu_capability()),
    }


def records_steps() -> bool:
    """Return whether workers on GPUs record training steps (fedsim.learning.recordings)."""
    return os.environ.get(CUDA_GRAPHS) != "0"


def facts_of_process(device: str, probe: Mapping[str, str]) -> dict[str, str]:
    """Return all facts of this process; call workers.assembly.fix_numerics first.

    device: the kind of device that the process uses, cpu or cuda. probe: the probe digests by kind of device.
    """
    import torch

    settings = [f"{torch.get_num_threads()} threads"]
    facts = {**facts_of_machine(), "device": device}
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        settings += ["deterministic" if torch.are_deterministic_algorithms_enabled() else "not deterministic"]
        settings += ["TF32"] if torch.backends.cuda.matmul.allow_tf32 else []
    facts["settings"] = ", ".join(settings)
    return facts | {PROBE.format(kind): digest for kind, digest in probe.items()}


def differences(there: Facts, here: Facts) -> Iterator[Difference]:
    """Yield the facts that both sides know and that differ, in the order of `here`."""
    for name, value in here.items():
        if there.get(name, value) != value:
            yield Difference(name, there[name], value)


def processor_name() -> str:
    """Return the model name of this machine's processor; '' if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return "".join(c for c in names[0] if " " <= c <= "~") if names else ""
