"""fedsim revoke: keys of remote workers that open nothing any more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fedsim.errors import UsageError
from launch.runs import manifest
from workers.storage.atomic_files import RunLock
from workers.transport.join_credentials import JOIN, REVOKED, JoinCredentials, Revocations


def revoke(run: Path, workers: Sequence[int]) -> None:
    """Tell the run's coordinator.

    Raises:
        UsageError: if there is nothing to revoke.
        DataError: if data is missing or damaged.
        DiskError: if the disk cannot be read or written.
    """
    keys = _keys(run)
    for worker in workers:
        if worker not in range(keys):
            raise UsageError(f"{run} has no worker {worker}; it has workers 0 to {keys - 1}")
    Revocations(run / REVOKED).add(workers)
    for worker in sorted(set(workers)):
        click.echo(f"worker {worker}: its key opens nothing any more, and its connection is ended")


def _keys(run: Path) -> int:
    """How many workers have one.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
    """
    result = manifest.read(run)
    starts = [result, *result.get("resumes", [])]
    if not starts[-1]["execution"]["remote_workers"]:
        raise UsageError(f"{run} has no remote workers (--remote-workers): nobody has a key")
    if not _goes_on(run):
        raise UsageError(f"{run} is not being run: its keys open nothing, and fedsim resume makes new ones")
    if not (run / JOIN).exists():
        raise UsageError(f"{run} has no {JOIN} at the moment: it is being set up, or at its end")
    return len(JoinCredentials.read(run / JOIN).workers)


def _goes_on(run: Path) -> bool:
    """Whether it has a coordinator; one that was killed has left its join.json."""
    try:
        RunLock(run).release()
    except UsageError:
        return True
    return False
