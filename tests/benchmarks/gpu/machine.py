"""Versions, seconds of imports in a new interpreter, and the limits of the card."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from tests.benchmarks.gpu.stage import Stage

IMPORTS = """
import time
a = time.perf_counter()
import torch
b = time.perf_counter()
import launch.session.session, workers.worker.main
print(b - a, time.perf_counter() - b)
"""


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Seconds of one of many calls, after two that are not counted."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(2):
        work()
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - began) / repeats


def run(stage: Stage) -> None:
    with stage.part("imports"):
        new = subprocess.run(
            [sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True, timeout=stage.left
        )
        of_torch, project = map(float, new.stdout.split())
        stage.report(
            f"a new interpreter imports torch in {of_torch:.1f} s, then the project in {project:.1f} s",
            {"import_torch_s": of_torch, "import_project_s": project},
        )
    versions = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    if stage.gpu:
        versions["card"] = torch.cuda.get_device_name()
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader --id=0"
        with stage.part("nvidia-smi"):
            versions["driver"] = subprocess.run(
                query.split(), check=True, capture_output=True, text=True, timeout=30
            ).stdout.strip()
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    stage.report(", ".join(f"{name} {value}" for name, value in versions.items()), versions)
    device, size = ("cuda", 8192) if stage.gpu else ("cpu", 512)
    one = torch.rand(size, size, device=device)
    other = torch.empty_like(one)
    copied = 4 * size**2 / seconds_of(lambda: other.copy_(one), 20) / 1e9
    stage.report(f"copies of {4 * size**2:,} bytes: {copied:.1f} GB/s", {"copy_GB_s": copied})
    for numerics in ("float32", "tf32") if stage.gpu else ("float32",):
        torch.backends.cuda.matmul.allow_tf32 = numerics == "tf32"
        rate = 2 * size**3 / seconds_of(lambda: torch.mm(one, one, out=other), 10) / 1e12
        stage.report(f"matrix products, {numerics}: {rate:.2f} TFLOP/s", {f"matmul_{numerics}_TFLOP_s": rate})
