"""The process of a worker, from its first connection to its last envelope."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsim.errors import AccessError, ConnectionLost, FedsimError, Interrupted, WireError
from fedsim.experiment import Experiment, convert
from fedsim.learning.recordings import Recordings, cuda_graphs
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from fedsim.wire.envelope import Envelope
from workers import protocol_messages as messages
from workers.assembly import assemble
from workers.heap import give_back, set_malloc_thresholds
from workers.numerics import facts_of_process, processor_name, records_steps
from workers.place import place_of_process
from workers.probe import probe
from workers.storage.shared_frozen import map_frozen, map_start
from workers.transport.dealer import Connection
from workers.transport.handshake import Hello, refusal_reason
from workers.worker.heartbeat import Heartbeat, while_it_starts
from workers.worker.lanes import Lanes
from workers.worker.runtime import WorkerRuntime

JOIN_DEADLINE = 120.0
"""Seconds to wait for the coordinator's answer to a hello."""
IDLE = 5.0
"""Seconds of silence after which a remote worker sends a heartbeat. The coordinator answers it, or asks a
worker that it has removed to join again."""
UNANSWERED = 3
"""The number of successive unanswered heartbeats after which the connection counts as lost."""


def run(spec: Mapping[str, Any]) -> int:
    """Connect, set up, and serve until 'stop'; return the exit code. Errors are written to the log."""
    hello = Hello(spec["token"], spec["index"], os.getpid())
    connection = Connection(spec["address"], hello, spec["max_frame"])
    try:
        registration_reply = connection.receive(JOIN_DEADLINE)
        if registration_reply is None or registration_reply.header.kind != "welcome":
            print(f"no welcome from the coordinator within {JOIN_DEADLINE:g} s", file=sys.stderr)
            return 4
        try:
            with reported(connection, registration_reply.header.run):
                config = messages.read_welcome(registration_reply)
                runtime = set_up(connection, registration_reply.header.run, config, spec["device"])
                set_malloc_thresholds()
                announce(connection, runtime.problem, runtime.run)
        except Exception:
            traceback.print_exc()
            connection.close(linger=5.0)
            return 1
        serve(connection, runtime, runtime.replies)
        return 0
    finally:
        connection.close(linger=1.0)


@contextmanager
def reported(connection: Connection, run: str) -> Iterator[None]:
    """Report an exception of the block to the coordinator, and raise it."""
    try:
        yield
    except Exception as e:
        with suppress(FedsimError):  # the connection may be lost
            connection.send(messages.failed(run, e))
        raise


def set_up(connection: Connection, run: str, config: messages.WorkerConfig, device: str) -> WorkerRuntime:
    """Build the runtime that the configuration describes."""
    if config.run_dir is None:
        raise WireError("the coordinator's welcome names no folder for clients' states")
    experiment = convert(Experiment, config.experiment, "the coordinator's experiment")
    with while_it_starts(connection, run):
        problem = assemble(experiment, Path(config.data_dir) if config.data_dir else None, device)
        map_frozen(problem.net.module, Path(config.run_dir))
        map_start(problem.start, Path(config.run_dir))
        warm_up(problem)
        problems = [problem]
        if device.startswith("cuda"):
            problems += [problem.beside() for _ in range(1, config.lanes or 1)]
            for each in problems if records_steps() else ():
                each.net.recordings = Recordings(cuda_graphs(), each.net.device)
    return WorkerRuntime(problem, Path(config.run_dir), run, config.index, problems)


def announce(
    connection: Connection,
    problem: Problem,
    run: str,
    digest: bool = False,
    names: Mapping[str, str] | None = None,
) -> None:
    """Tell the coordinator that this process is ready, and send its manifest.

    digest: True to include the digest of the data. names: maps the paths of user files on this
    machine to the coordinator's paths, if they differ.
    """
    with while_it_starts(connection, run):
        manifest = messages.WorkerManifest(
            problem.data_digest if digest else "",
            messages.sources_of(problem, names or {}),
            facts_of_process(problem.net.device.type, probe(problem)),
            processor_name(),
            place_of_process(problem.net.device.type),
        )
        give_back(problem.net.layout.size)
    connection.send(messages.ready(run, manifest))


def warm_up(problem: Problem) -> None:
    """Train on two blank examples, because first calls of forward, backward and optimiser are slow."""
    net, shape = problem.net, problem.dataset.train_inputs.shape[1:]
    stored = problem.dataset.train_targets
    targets = torch.from_numpy(np.zeros((2, *stored.shape[1:]), stored.dtype)).to(net.device)
    blank = Shard(net, torch.zeros((2, *shape), device=net.device), targets, 1.0)
    minimise(blank, problem.start, how=LocalTraining(epochs=1), rng=RandomStream(0, "warm up"), round=1)


def check_over(farewell: Envelope) -> None:
    """Check that a 'stop' ends a complete run.

    Raises:
        Interrupted: if the run has rounds left.
    """
    if messages.was_interrupted(farewell):
        raise Interrupted("the run was interrupted; once it is resumed, this worker may join again")


def serve(
    connection: Connection,
    runtime: WorkerRuntime,
    handle: Callable[[Envelope, Problem], list[Envelope]],
    idle: float | None = None,
) -> None:
    """Answer the coordinator's envelopes until 'stop'.

    handle: returns the replies to an envelope, computed on one of the runtime's problems. idle: seconds of
    silence before a heartbeat. None: no heartbeats, as for a local worker, which the kernel ends with its
    coordinator.

    Raises:
        AccessError: if the coordinator refuses this worker.
        ConnectionLost: if the connection has ended.
        Interrupted: if the run was interrupted.
    """
    heartbeat, unanswered = Heartbeat(connection), 0

    def answer(envelope: Envelope, problem: Problem) -> None:
        """Compute and send the replies. A large upload is freed when this function returns."""
        heartbeat.begin(envelope.header)
        try:
            replies = handle(envelope, problem)
        finally:
            heartbeat.end(envelope.header)
        for reply in replies:
            connection.send(reply)

    lanes = Lanes(runtime.problems, heartbeat)
    try:
        while True:
            lanes.advance()
            if not lanes.free:
                continue
            envelope = connection.receive(0.0 if lanes.busy else idle or 60.0)
            if envelope is None:
                if lanes.busy:
                    continue
                if idle and unanswered == UNANSWERED:
                    silence = f"nothing was received from {connection.address} for {idle * UNANSWERED:g} s"
                    raise ConnectionLost(silence)
                if idle:  # without a task, so that it renews no lease: the task may have been lost
                    connection.offer(messages.idle(runtime.run))
                    unanswered += 1
                continue
            unanswered = 0
            if envelope.header.kind == "heartbeat":
                continue
            if envelope.header.kind == "stop":
                check_over(envelope)
                return
            if envelope.header.kind == "refused":
                raise AccessError(f"refused: {refusal_reason(envelope)}")
            lanes.start(partial(answer, envelope))
    finally:
        lanes.close()
