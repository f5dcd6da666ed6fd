"""Assign a GPU or CPU cores to each worker."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedsim.errors import UsageError
from fedsim.specs import whole

ELSEWHERE = "elsewhere"
"""The coordinator's name for the GPU of a remote worker."""


@dataclass(frozen=True)
class Placement:
    """The hardware of one worker. gpu: a GPU in the notation of CUDA_VISIBLE_DEVICES, or None."""

    gpu: str | None
    cores: tuple[int, ...]

    @property
    def device(self) -> str:
        return "cuda" if self.gpu is not None else "cpu"

    def __str__(self) -> str:
        if self.gpu is not None:
            return f"cuda:{self.gpu}"
        return f"cpu {','.join(str(c) for c in self.cores)}".rstrip()


ROOT = Path("/")
"""The folder that contains dev and proc."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Return the GPUs that torch can use here, in the notation of CUDA_VISIBLE_DEVICES.

    This does not initialise CUDA, because workers forked later could not use it. The variable is parsed as
    CUDA parses it: the first GPU that does not exist ends the list, and a repeated GPU makes all GPUs
    invisible (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    present = len(list((ROOT / "dev").glob("nvidia[0-9]*"))) if _torch_has_cuda() else 0
    asked = os.environ.get(VISIBLE)
    if asked is None or not present:
        return [str(i) for i in range(present)]
    matched: list[str] = []
    names = [name.strip() for name in asked.split(",")]
    prefix = names[0][:4] if names[0].startswith(("GPU-", "MIG-")) else ""
    for name in names:
        gpu = _named(name, prefix) if prefix else _numbered(name, present)
        if gpu is None:
            break
        if gpu in matched:
            return []
        matched.append(gpu)
    return matched


def _numbered(name: str, present: int) -> str | None:
    """Return the GPU's number at the beginning of a name; None if this GPU does not exist."""
    digits = re.match(r"\+?([0-9]+)", name)
    return str(int(digits[1])) if digits and int(digits[1]) < present else None


def _named(name: str, prefix: str) -> str | None:
    """Return a GPU or MIG device by its UUID, or None. A GPU's UUID may be shortened to a unique prefix."""
    known = [line for line in _driver_says("GPU UUID") if line.startswith(name)]
    if not name.startswith(prefix) or (prefix == "GPU-" and _driver_says("GPU UUID") and len(known) != 1):
        return None
    return known[0] if known else name


def _torch_has_cuda() -> bool:
    """Return whether torch was built with CUDA, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True  # an unusual installation of torch: if it has no CUDA, the worker reports that
    return re.search(r"^cuda\b[^=\n]*= *None", text, re.MULTILINE) is None


def why_no_gpu() -> str:
    """Return the reason why an expected GPU cannot be used; "" if none is expected."""
    asked = os.environ.get(VISIBLE, "")
    if list((ROOT / "dev").glob("nvidia[0-9]*")) and not _torch_has_cuda():
        return "torch is built without CUDA"
    if not visible_gpus() and asked.strip() and not asked.strip().startswith("-"):
        return f"{VISIBLE}={asked} names no GPU that is here"
    return ""


def remark(devices: str) -> str:
    """Return a message for the user if `auto` selects the CPU although a GPU is expected; else ""."""
    why = why_no_gpu() if devices == "auto" and not visible_gpus() else ""
    return f"{why}: --devices auto takes the CPU" if why else ""


def gpu_models() -> list[str]:
    """Return the NVIDIA driver's names of this machine's GPUs."""
    return _driver_says("Model")


def _driver_says(key: str) -> list[str]:
    """Return the NVIDIA driver's value of a key for each GPU."""
    files = sorted((ROOT / "proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:")]


def gpus_of(devices: str) -> int:
    """Return the number of GPUs that --devices names; assign_devices checks that they exist."""
    if devices == "auto":
        return len(visible_gpus())
    return len({name.strip() for name in devices.split(",") if name.strip().startswith("cuda")})


def assign_devices(devices: str, workers: int, threads: int) -> tuple[Placement, ...]:
    """Place worker i on GPU i mod n, or on `threads` cores. Workers share cores only if there are too few.

    Raises:
        UsageError: if a device does not exist, or `devices` cannot be parsed.
    """
    gpus = visible_gpus()
    selected = list(gpus) if devices == "auto" else []
    for name in () if devices in ("auto", "cpu") else devices.split(","):
        number = whole(name.strip().removeprefix("cuda:"))
        if not name.strip().startswith("cuda:") or number < 0:
            raise UsageError(f"--devices {devices!r}: give auto, cpu, or a list such as cuda:0,cuda:1")
        if number >= len(gpus):
            why = f" ({why_no_gpu()})" if why_no_gpu() else ""
            raise UsageError(f"--devices {name.strip()}: this machine shows {len(gpus)} GPU(s){why}")
        selected.append(gpus[number])
    cores = sorted(os.sched_getaffinity(0))
    placements = []
    for i in range(workers):
        mine = tuple(sorted({cores[(i * threads + t) % len(cores)] for t in range(threads)}))
        placements.append(Placement(selected[i % len(selected)] if selected else None, mine))
    return tuple(placements)
