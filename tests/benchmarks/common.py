"""Shared by the benchmark scripts: options, data of FashionMNIST's shape, one fedsim run, its figures.

Every benchmark takes --tiny, with which it runs through in seconds. Its figures say nothing then; CI runs
all of them in this way (tests/benchmarks/test_benchmarks.py), so that none is dead when it is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.process_tree import children_of

LAUNCH = (sys.executable, "-m", "launch", "launch")
FULL, FEW = (60_000, 10_000), (2_000, 400)
"""Train and test examples: those of FashionMNIST and of MNIST, and those for --tiny."""


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with --tiny, whose help is a module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="only show that it runs: small sizes, once")
    return parser


def fashion_shaped(folder: Path, examples: tuple[int, int] = FULL, name: str = "FashionMNIST") -> Path:
    """Write random idx files of FashionMNIST's shape.

    Args:
        folder: the data folder; its subfolder NAME/raw must not exist.
        examples: how many train and test examples.
        name: the data set's folder, FashionMNIST or MNIST.

    Returns:
        The data folder.
    """
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    rng = np.random.Generator(np.random.Philox(key=1))
    for part, n in zip(("train", "t10k"), examples, strict=True):
        pixels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        labels = np.arange(n, dtype=np.uint8) % 10
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, n, 28, 28) + pixels.tobytes()
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, n) + labels.tobytes())
    return folder


def launch(out: Path, *arguments: str) -> Path:
    """Run `fedsim launch` as a user would.

    Returns:
        The run folder.

    Raises:
        CalledProcessError: if the command fails.
    """
    command = [*LAUNCH, "--out", str(out), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    return out


def round_seconds(run: Path, warm: int) -> list[float]:
    """Wall seconds of every round after the first `warm`."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [row["seconds"] for row in rows if row["round"] > warm]


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded


def pss(pid: int) -> int:
    """Read the proportional set size in bytes; 0 for a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return 0


def memory_of(pid: int) -> list[int]:
    """Read the PSS of a process and of each of its descendants, in bytes."""
    return [pss(process) for process in (pid, *children_of(pid))]


def watched(out: Path, *arguments: str, pause: float) -> tuple[list[int], float]:
    """Run `fedsim launch` and look at its memory every `pause` seconds.

    Returns:
        The PSS in bytes of each process, largest first, when their sum was largest; wall seconds.

    Raises:
        CalledProcessError: if the command fails.
    """
    began, peak = time.monotonic(), [0]
    process = subprocess.Popen([*LAUNCH, "--out", str(out), *arguments], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid), key=sum)
        time.sleep(pause)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return sorted(peak, reverse=True), time.monotonic() - began


def spread(values: list[float], unit: str = "", digits: int = 3) -> str:
    """median (smallest to largest)"""
    return (
        f"{statistics.median(values):.{digits}f}{unit} "
        f"({min(values):.{digits}f} to {max(values):.{digits}f}, n = {len(values)})"
    )
