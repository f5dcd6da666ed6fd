"""The n-th write, rename, link or fsync of a run finds the disk full, for every n until none is hit: after a
resume the bits are those of an undisturbed run (docs/references/faults.md#methods).

What a process that dies at any of them leaves is among the disks of test_power_cut.py.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from fedsim.errors import DiskError
from fedsim.experiment import Experiment
from launch.configuration.execution import Execution
from launch.runs.resume import Resumption
from launch.session.run import launch, resume
from tests.support.reproducible import fresh_processes, without_seconds
from workers.storage import atomic_files

pytestmark = [pytest.mark.process, pytest.mark.chaos]

FULL, UNTOUCHED = 5, 0
EXPERIMENT = Experiment(
    algo="fedlap", clients=2, rounds=2, model="logistic", hyperparameters={"local.epochs": 1}
)
MOST = 200
"""More calls than any of these runs makes; the loop ends before."""


class Fault:
    """Counts calls, and fails at the n-th: what has been written until then may be torn."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, tear: Callable[[], Any] = lambda: None) -> None:
        self.left -= 1
        if self.left:
            return
        tear()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Torn:
    """A file whose writes may stop in the middle."""

    def __init__(self, file: IO[bytes], fault: Fault) -> None:
        self.file, self.fault = file, fault

    def write(self, data: Any) -> int:
        half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
        self.fault(lambda: (self.file.write(half), self.file.flush()))
        return self.file.write(data)

    def truncate(self) -> None:
        self.fault()
        self.file.truncate()

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def inject(fault: Fault) -> None:
    """Put the fault in the way of everything that reaches the disk."""
    for name in ("rename", "fsync", "link"):
        real = getattr(os, name)

        def shim(*supplied: Any, real: Callable[..., Any] = real) -> Any:
            fault()
            return real(*supplied)

        setattr(os, name, shim)
    write = os.write

    def written(handle: int, data: Any) -> int:
        fault(lambda: write(handle, data[: len(data) // 2]))
        return write(handle, data)

    os.write = written

    def opened(path: Any, mode: str = "r", **more: Any) -> Any:
        file = builtins.open(path, mode, **more)  # noqa: SIM115
        return Torn(file, fault) if mode in ("wb", "r+b") else file

    atomic_files.open = opened  # type: ignore[attr-defined]


def first_start(folder: str, at: int) -> None:
    atomic_files.SPARE_BYTES = 0  # every state and checkpoint is written over one that is needed no more
    inject(Fault(at))
    try:
        launch(EXPERIMENT, Execution(workers=0, out=folder), quiet=True)
    except DiskError:
        os._exit(FULL)
    os._exit(UNTOUCHED)


def second_start(folder: str) -> None:
    stored = Path(folder) / "manifest.json"
    if stored.exists() and Resumption.open(Path(folder)).complete:
        pass  # its summary was written before
    elif stored.exists():
        resume(Path(folder), {}, quiet=True)
    else:  # it never became a run
        launch(EXPERIMENT, Execution(workers=0, out=folder), quiet=True)
    os._exit(UNTOUCHED)


@pytest.fixture(scope="module")
def ended() -> Callable[..., int]:
    return fresh_processes(__name__, 60.0)


def digests(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {key: summary[key] for key in ("status", "model_sha256", "clients_sha256", "bytes_up")} | {
        "metrics": without_seconds(lines)
    }


def test_whatever_is_written_may_find_the_disk_full(ended: Callable[..., int], tmp_path: Path) -> None:
    assert ended(first_start, str(tmp_path / "plain"), MOST) == UNTOUCHED
    expected, hits = digests(tmp_path / "plain"), 0
    for at in range(1, MOST):
        folder = tmp_path / str(at)
        code = ended(first_start, str(folder), at)
        if code == UNTOUCHED:
            break
        hits += 1
        assert code == FULL, f"call {at}"
        assert ended(second_start, str(folder)) == UNTOUCHED, f"call {at}: it does not go on"
        assert digests(folder) == expected, f"call {at}"
    assert 25 < hits < MOST - 1
