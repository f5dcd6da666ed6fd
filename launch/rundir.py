"""The files a run leaves (design section 9): a contract that other tools read."""

from __future__ import annotations

import csv
import json
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from fedsim import plugin
from fedsim.errors import DiskError, UsageError
from fedsim.wire.ledger import COLUMNS, Entry
from launch.execution import Execution
from workers import timeline
from workers.devices import gpu_models

LIBRARIES = ("torch", "numpy", "pyzmq", "msgspec", "xxhash", "safetensors", "scikit-learn", "zstandard")


class RunDir:
    """Creates the folder and writes the contract's files. Errors: DiskError, UsageError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise UsageError(f"--out {path}: this is a file; name a folder")
        if path.exists() and any(path.iterdir()):
            raise UsageError(f"--out {path}: the folder is not empty; choose another or remove it")
        try:
            for name in ("checkpoints", "state", "logs"):
                (path / name).mkdir(parents=True, exist_ok=True)
            self._metrics: TextIO = (path / "metrics.jsonl").open("w")
            self._ledger: TextIO = (path / "ledger.csv").open("w", newline="")
            self._timeline: TextIO = (path / "timeline.csv").open("w", newline="")
        except OSError as e:
            raise DiskError(f"cannot make the run folder {path}: {e.strerror}") from None
        self._rows = csv.writer(self._ledger, lineterminator="\n")
        self._rows.writerow(COLUMNS)
        self._spans = csv.writer(self._timeline, lineterminator="\n")
        self._spans.writerow(timeline.COLUMNS)

    @staticmethod
    def default_path(algo: str, seed: int) -> Path:
        """runs/<time>-<algorithm>-<seed>, with a number behind it if that exists; mine-Mine of a user's."""
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{plugin.short(algo).replace(':', '-')}-{seed}"
        path, n = Path("runs") / stem, 1
        while path.exists():
            path, n = Path("runs") / f"{stem}-{n}", n + 1
        return path

    def write_json(self, name: str, value: Any) -> None:
        temporary = self.path / f".{name}"
        try:
            temporary.write_text(json.dumps(value, indent=1) + "\n")
            temporary.rename(self.path / name)
        except OSError as e:
            raise DiskError(f"cannot write {self.path / name}: {e.strerror}") from None

    def write_manifest(self, experiment: Mapping[str, Any], execution: Execution, run: str) -> None:
        self.write_json(
            "manifest.json",
            {
                "format": 1,
                "run": run,
                "experiment": experiment,
                "execution": asdict(execution),
                "versions": versions(),
                "platform": {
                    "system": platform.platform(),
                    "machine": platform.machine(),
                    "processor": _processor(),
                    "gpus": gpu_models(),
                },
                "seeds": {"run": experiment["seed"], "streams": "blake2b(seed|purpose|round|client|part)"},
                "started": datetime.now().astimezone().isoformat(timespec="seconds"),
                "command": sys.argv,
            },
        )

    def write_processes(self, processes: list[Any]) -> None:
        self.write_json("processes.json", [asdict(p) for p in processes])

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._append(self._metrics, lambda: self._metrics.write(json.dumps(metrics) + "\n"))

    def append_ledger(self, entries: list[Entry]) -> None:
        self._append(self._ledger, lambda: self._rows.writerows(entries))

    def append_timeline(self, spans: list[timeline.Span]) -> None:
        self._append(self._timeline, lambda: self._spans.writerows(spans))

    def _append(self, file: TextIO, write: Any) -> None:
        try:
            write()
            file.flush()
        except OSError as e:
            raise DiskError(f"cannot write {file.name}: {e.strerror}") from None

    def close(self) -> None:
        for file in (self._metrics, self._ledger, self._timeline):
            with suppress(OSError):  # every line was flushed, or its failure reported, when it was written
                file.close()


def versions() -> dict[str, str]:
    """Python, fedsim and the libraries that results may depend on."""
    import fedsim

    return {
        "fedsim": fedsim.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    """The CPU's instruction set as torch sees it: bits may differ between capabilities."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())
