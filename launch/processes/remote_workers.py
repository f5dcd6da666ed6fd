"""Workers on other machines: `fedsim worker` and `fedsim revoke`.

This module imports torch only in its functions, after they have set CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedsim.errors import Interrupted, UsageError
from launch.runs.folder import RunFolder
from launch.terminal import say
from workers.devices import assign_devices, remark
from workers.storage.atomic_files import RunLock
from workers.transport.join_credentials import JOIN, REVOKED, JoinCredentials, Revocations
from workers.worker.seats import rank


def join(
    file: Path,
    *,
    url: str | None,
    data_dir: Path | None,
    seat: str | None,
    devices: str,
    patience: float,
    codecs: Sequence[Path] = (),
    **choices: Path | None,
) -> None:
    """Run as a worker until the run is over.

    Args:
        url: The coordinator's address from here, if it is not the one in `file`.
        seat: The worker's number, "auto" for the launcher's rank, or None for the first free number.
        devices: "auto", "cpu", or a list such as "cuda:0,cuda:1" (worker i on device i mod n).
        patience: Seconds to wait for a coordinator that does not answer.
        codecs: Paths of the user's codecs on this machine.
        **choices: Paths of the user's other files, by option.
    """
    worker = _worker(seat)
    [*_, placed] = assign_devices(devices, max(1, (worker or 0) - JoinCredentials.read(file).first + 1), 1)
    if fallback := remark(devices):
        say(fallback)
    os.environ["CUDA_VISIBLE_DEVICES"] = placed.gpu or ""
    from workers.worker.remote import remote_worker  # imports torch

    try:
        remote_worker(
            file, seat=worker, url=url, data_dir=data_dir, patience=patience, choices=choices, codecs=codecs
        ).run(say)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the run continues without this worker") from None


def _worker(seat: str | None) -> int | None:
    """Return the worker number for --seat; None means the first free one."""
    if seat == "auto":
        return rank(os.environ)
    if seat is not None and not seat.isdecimal():
        raise UsageError(f"--seat {seat!r}: give the number of a worker, 0, 1, ..., or auto")
    return None if seat is None else int(seat)


def revoke(run: Path, workers: Sequence[int]) -> None:
    """Revoke the keys of remote workers of a running run."""
    keys = _keys(run)
    for worker in workers:
        if worker not in range(keys):
            raise UsageError(f"{run} has no worker {worker}; it has workers 0 to {keys - 1}")
    Revocations(run / REVOKED).add(workers)
    for worker in sorted(set(workers)):
        say(f"worker {worker}: its key opens nothing any more, and its connection is ended")


def _keys(run: Path) -> int:
    """Return the number of workers that have a key."""
    opened = RunFolder.open(run)
    execution = opened.starts[-1]["execution"]
    if not execution["remote_workers"]:
        raise UsageError(f"{run} has no remote workers (--remote-workers): no worker has a key")
    if not _is_running(run):
        raise UsageError(f"{run} is not being run: its keys open nothing, and fedsim resume makes new ones")
    if not (run / JOIN).exists():
        raise UsageError(f"{run} has no {JOIN} at the moment: it is being set up, or at its end")
    return len(JoinCredentials.read(run / JOIN).workers)


def _is_running(run: Path) -> bool:
    """Return True if a coordinator runs. A join.json is no sign of it: a killed coordinator may leave one."""
    try:
        RunLock(run).release()
    except UsageError:
        return True
    return False
