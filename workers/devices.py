"""Where each worker computes: a GPU where there is one, else CPU cores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedsim.errors import UsageError

ELSEWHERE = "elsewhere"
"""The GPU of a remote worker, as the coordinator knows it."""


@dataclass(frozen=True)
class Placement:
    """One worker's place. gpu: the device's number as CUDA_VISIBLE_DEVICES wants it, or None."""

    gpu: str | None
    cores: tuple[int, ...]

    @property
    def device(self) -> str:
        return "cuda" if self.gpu is not None else "cpu"

    @property
    def fresh(self) -> bool:
        """Start the worker as a new interpreter: CUDA after a fork is not shown to be safe yet."""
        return self.gpu is not None

    def __str__(self) -> str:
        if self.gpu is not None:
            return f"cuda:{self.gpu}"
        return f"cpu {','.join(str(c) for c in self.cores)}".rstrip()


def visible_gpus() -> list[str]:
    """GPUs of this machine without starting CUDA: a forked worker could not use it then."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return [gpu for gpu in asked.split(",") if gpu and gpu != "-1"]
    result = Path("/dev").glob("nvidia[0-9]*")
    return sorted((p.name.removeprefix("nvidia") for p in result), key=int)


def gpu_models() -> list[str]:
    """What the NVIDIA driver calls this machine's GPUs."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line.removeprefix("Model:").strip() for line in lines if line.startswith("Model:")]


def assign_devices(devices: str, workers: int, threads: int) -> tuple[Placement, ...]:
    """Worker i on GPU i mod n, or on `threads` cores of its own while there are enough.

    Raises:
        UsageError: for a device that is not there.
    """
    gpus = visible_gpus()
    if devices == "auto":
        selected = gpus
    elif devices == "cpu":
        selected = []
    else:
        selected = []
        for name in devices.split(","):
            number = name.strip().removeprefix("cuda:")
            if not name.strip().startswith("cuda:") or not number.isdigit():
                raise UsageError(f"--devices {devices!r}: give auto, cpu, or a list such as cuda:0,cuda:1")
            if int(number) >= len(gpus):
                raise UsageError(f"--devices {name.strip()}: this machine shows {len(gpus)} GPU(s)")
            selected.append(gpus[int(number)])
    cores = sorted(os.sched_getaffinity(0))
    placements = []
    for i in range(workers):
        mine = tuple(sorted({cores[(i * threads + t) % len(cores)] for t in range(threads)}))
        placements.append(Placement(selected[i % len(selected)] if selected else None, mine))
    return tuple(placements)
