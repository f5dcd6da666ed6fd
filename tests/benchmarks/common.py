"""Shared by the benchmark scripts: data of FashionMNIST's shape, one fedsim run, its figures."""

from __future__ import annotations

import json
import os
import statistics
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


def fashion_shaped(folder: Path) -> Path:
    """Write random idx files of FashionMNIST's shape; returns the data folder."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.Generator(np.random.Philox(key=1))
    for part, n in (("train", 60_000), ("t10k", 10_000)):
        pixels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        labels = np.arange(n, dtype=np.uint8) % 10
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, n, 28, 28) + pixels.tobytes()
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, n) + labels.tobytes())
    return folder


def launch(out: Path, *arguments: str) -> Path:
    """Run `fedsim launch` as a user would; returns the run folder. Errors: CalledProcessError."""
    command = [sys.executable, "-m", "launch", "launch", "--out", str(out), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ, timeout=900)
    return out


def round_seconds(run: Path, warm: int) -> list[float]:
    """Wall seconds of every round after the first `warm`."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [row["seconds"] for row in rows if row["round"] > warm]


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded


def spread(values: list[float], unit: str = "", digits: int = 3) -> str:
    """median (smallest to largest)"""
    return (
        f"{statistics.median(values):.{digits}f}{unit} "
        f"({min(values):.{digits}f} to {max(values):.{digits}f}, n = {len(values)})"
    )
