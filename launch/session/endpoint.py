"""The coordinator's connection to its workers: in this process, in other processes, or on other machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fedsim.problem import Problem
from fedsim.wire.ledger import Ledger
from fedsim.wire.schema import all_fields
from launch.configuration.execution import Execution
from launch.numbers import counted
from launch.session.recorder import Recorder
from workers.devices import Placement
from workers.transport.endpoint import Endpoint, Loopback
from workers.transport.join_credentials import JOIN, JOIN_HERE, REVOKED, Revocations
from workers.transport.listeners import CurveListener, local_listener
from workers.transport.router import ZmqEndpoint
from workers.transport.run_keys import RunKeys
from workers.worker.runtime import WorkerRuntime

STATE_FACTOR = 16
"""The longest state of a client, which is sent to remote workers, in units of the longest frame of a message
from a worker."""
FRAME_SLACK = 1 << 16
HELD = 2
"""The number of uploads from a worker's lane that may wait for the coordinator: those of the current and the
next task."""


def curve_endpoint(
    folder: Path,
    run: str,
    execution: Execution,
    ledger: Ledger,
    max_frame: int,
    to_workers: int,
    pending: Callable[[int], int],
    note: Callable[[str], None],
    numerics: str,
) -> Endpoint:
    """Open the CURVE listener and write RUN/join.json.

    New keys are valid only for this start of the run: keys of an earlier start, revoked or not, are no longer
    accepted. Keys from a file of the user are the same at every start, and a revoked one stays revoked.

    Args:
        folder: The run folder.
        run: The run's name.
        execution: The settings: the address to listen at, and the numbers of workers.
        ledger: The ledger in which the endpoint counts bytes.
        max_frame: The longest frame of a message from a worker, in bytes.
        to_workers: The longest frame of a message to a worker, in bytes.
        pending: A function that returns the maximum number of unread bytes from one worker, given the length
            of the longest state in bytes.
        note: A function that prints a line.
        numerics: The run's numerics.
    """
    path, revocations = folder / JOIN, Revocations(folder / REVOKED)
    path.unlink(missing_ok=True)
    remote = execution.remote_workers
    if execution.keys:
        keys = RunKeys.read(Path(execution.keys), execution.workers)
    else:
        revocations.clear()
        keys = RunKeys.new(execution.workers)
    listener = CurveListener(execution.bind, keys.server, keys.workers, revocations)
    largest = STATE_FACTOR * max_frame
    endpoint = ZmqEndpoint(ledger, listener, largest, pending(largest))
    try:
        join = keys.join(run, numerics, endpoint.address, max(largest, to_workers))
        if execution.local_workers:
            here = msgspec.structs.replace(join, url=endpoint.address)
            here.part(range(remote, execution.workers)).write(folder / JOIN_HERE)
        join.part(range(remote)).write(path)
    except BaseException:
        endpoint.close()
        raise
    note(
        f"waiting for {counted(remote, 'worker')} at {endpoint.address}, at most {execution.join_within:g} "
        f"s; elsewhere: fedsim worker --join {path.resolve()}"
    )
    return endpoint


def open_endpoint(
    problem: Problem,
    execution: Execution,
    placements: Sequence[Placement],
    folder: Path,
    run: str,
    recorder: Recorder,
) -> Endpoint:
    """Open the endpoint and start the workers of this machine.

    Args:
        problem: The problem, whose messages' sizes limit the frames.
        execution: The settings of the workers.
        placements: The device and cores of every worker.
        folder: The run folder.
        run: The run's name.
        recorder: Its ledger counts the bytes, and its supervisor starts the processes.

    Raises:
        TaskError: if a worker fails.
        Interrupted: if a signal asked to stop.
    """
    ledger = recorder.ledger
    if not execution.workers:
        return Loopback(ledger, WorkerRuntime(problem, folder, run, 0))
    largest = max(problem.messages.largest_field, 4 * problem.net.layout.size)
    max_frame = 2 * largest + FRAME_SLACK
    # a model to evaluate may consist of samples; it is sent to workers, never by workers
    to_workers = max(max_frame, 2 * 4 * problem.net.layout.size * problem.evaluation.samples + FRAME_SLACK)
    # an encoded field and its indices are each at most as long as the dense field, so both fit in max_frame
    envelope = max_frame * max(len(all_fields(e.up)) for e in problem.messages.exchanges)
    if execution.remote_workers:

        def pending(state: int) -> int:
            return HELD * execution.lanes * (envelope + state)  # each upload follows a draft of the state

        return curve_endpoint(
            folder,
            run,
            execution,
            ledger,
            max_frame,
            to_workers,
            pending,
            recorder.display.note,
            problem.experiment.numerics,
        )
    listener = local_listener(execution.transport)
    endpoint = ZmqEndpoint(ledger, listener, max_frame, HELD * execution.lanes * envelope)
    try:
        specs = _specs(placements, folder, endpoint.address, listener.token, to_workers)
        recorder.supervisor.start_workers(specs, tuple(placements))
    except BaseException:
        endpoint.close()
        raise
    return endpoint


def _specs(
    placements: Sequence[Placement], folder: Path, address: str, token: str, max_frame: int
) -> list[dict[str, Any]]:
    """Return the fork server's specifications of the workers, one per placement."""
    return [
        {
            "index": i,
            "address": address,
            "token": token,
            "max_frame": max_frame,
            "log": str((folder / "logs" / f"worker-{i:03d}.log").resolve()),
            "device": placed.device,
            "cores": placed.cores,
            "env": {"CUDA_VISIBLE_DEVICES": placed.gpu or ""},
        }
        for i, placed in enumerate(placements)
    ]
