"""Workers on other machines: the coordinator's CURVE listener, `fedsim worker` and `fedsim revoke`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from fedsim.errors import Interrupted, UsageError
from fedsim.wire.ledger import Ledger
from launch.config import Execution
from launch.runs import manifest
from workers.storage.atomic_files import RunLock
from workers.transport.endpoint import Endpoint
from workers.transport.join_credentials import FORMAT, JOIN, REVOKED, JoinCredentials, KeyPair, Revocations
from workers.transport.listeners import CurveListener
from workers.transport.router import ZmqEndpoint

STATE_FACTOR = 16
"""A client's state, which remote workers borrow, is at most so many times as long as a message's field."""


def curve_endpoint(
    folder: Path,
    run: str,
    execution: Execution,
    ledger: Ledger,
    max_frame: int,
    pending: Callable[[int], int],
    note: Callable[[str], None],
) -> Endpoint:
    """Open the CURVE listener and write RUN/join.json.

    The keys are new: those of an earlier start open nothing, and which of them were revoked is forgotten.

    Args:
        folder: The run folder.
        run: The run's name.
        execution: Where to listen, and for how many workers.
        ledger: What the endpoint counts into.
        max_frame: The longest frame of a message, in bytes.
        pending: The bytes that one worker may have on their way, for the longest state, in bytes.
        note: Prints a line.
    """
    path, revocations = folder / JOIN, Revocations(folder / REVOKED)
    path.unlink(missing_ok=True)
    revocations.clear()
    server, count = KeyPair.new(), execution.remote_workers
    pairs = tuple(KeyPair.new() for _ in range(count))
    listener = CurveListener(execution.bind, server, pairs, revocations)
    largest = STATE_FACTOR * max_frame
    endpoint = ZmqEndpoint(ledger, listener, largest, pending(largest))
    try:
        JoinCredentials(FORMAT, run, endpoint.address, server.public, largest, pairs).write(path)
    except BaseException:
        endpoint.close()
        raise
    note(
        f"waiting for {count} workers at {endpoint.address}, at most {execution.join_within:g} s; "
        f"elsewhere: fedsim worker --join {path.resolve()}"
    )
    return endpoint


def join(file: Path, *, url: str | None, data_dir: Path | None, worker: int | None, patience: float) -> None:
    """Be a worker of a run until the run is over.

    Args:
        file: The run's join.json.
        url: The coordinator's address as seen from here, if it is not the file's.
        data_dir: The folder of the data files on this machine.
        worker: The worker's number; by default, the first that is missing.
        patience: Seconds after which a coordinator that does not answer is given up.

    Raises:
        FedsimError: any FedsimError.
    """
    from workers.worker.remote import RemoteWorker  # imports torch

    credentials = JoinCredentials.read(file)
    folder = data_dir.resolve() if data_dir else None
    try:
        RemoteWorker(credentials, url or credentials.url, folder, patience, worker).run(click.echo)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the run goes on without this worker") from None


def revoke(run: Path, workers: Sequence[int]) -> None:
    """Revoke the keys of remote workers of a run that goes on.

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
    """Count the workers that have a key.

    Raises:
        UsageError: if the run has no remote workers or is not being run.
        DataError: if data is missing or damaged.
    """
    result = manifest.read(run)
    starts = [result, *result.get("resumes", [])]
    if not starts[-1]["execution"]["remote_workers"]:
        raise UsageError(f"{run} has no remote workers (--remote-workers): nobody has a key")
    if not _is_running(run):
        raise UsageError(f"{run} is not being run: its keys open nothing, and fedsim resume makes new ones")
    if not (run / JOIN).exists():
        raise UsageError(f"{run} has no {JOIN} at the moment: it is being set up, or at its end")
    return len(JoinCredentials.read(run / JOIN).workers)


def _is_running(run: Path) -> bool:
    """Tell whether the run has a coordinator; one that was killed has left its join.json."""
    try:
        RunLock(run).release()
    except UsageError:
        return True
    return False
