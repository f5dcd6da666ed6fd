"""A worker process from its first connection to its last envelope."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from fedsim import plugins
from fedsim.errors import AccessError
from fedsim.experiment import Experiment, build_algorithm, convert
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from fedsim.wire.envelope import VERSION, Envelope, Header, blob, pack
from protocols import find
from workers.coordinator.registration import WorkerManifest
from workers.memory import set_malloc_thresholds
from workers.numerics import fix_numerics
from workers.transport.dealer import Connection, Hello
from workers.worker.heartbeat import Heartbeat
from workers.worker.runtime import WorkerRuntime, failure

JOIN_DEADLINE = 120.0
IDLE = 5.0
"""A remote worker that has heard nothing for so long says that it is there: if the coordinator has given
it up meanwhile, its answer is that it must join again."""


def run(spec: dict[str, Any]) -> int:
    """Connect, set up, serve until 'stop'. Returns the exit code; errors go to the log."""
    hello = Hello(spec["token"], spec["index"], os.getpid())
    connection = Connection(spec["address"], hello, spec["max_frame"])
    try:
        registration_reply = connection.receive(JOIN_DEADLINE)
        if registration_reply is None or registration_reply.header.kind != "welcome":
            print(f"no welcome from the coordinator within {JOIN_DEADLINE:g} s", file=sys.stderr)
            return 4
        worker_config = msgspec.json.decode(bytes(registration_reply.frames[0]))
        try:
            runtime = set_up(connection, registration_reply, worker_config, spec["device"])
        except Exception:
            traceback.print_exc()
            connection.close(linger=5.0)
            return 1
        set_malloc_thresholds()
        announce(connection, runtime)
        serve(connection, runtime, lambda envelope: [runtime.handle(envelope)])
        return 0
    finally:
        connection.close(linger=1.0)


def set_up(
    connection: Connection, registration_reply: Envelope, worker_config: Mapping[str, Any], device: str
) -> WorkerRuntime:
    """What the orders describe.

    Raises:
        FedsimError: whatever goes wrong, which the coordinator has been told.
    """
    try:
        experiment = convert(Experiment, worker_config["experiment"], "the coordinator's experiment")
        algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
        fix_numerics(experiment.threads, device)
        data_dir = Path(worker_config["data_dir"]) if worker_config["data_dir"] else None
        problem = Problem.build(experiment, algorithm, data_dir, device)
        warm_up(problem)
        return WorkerRuntime(
            problem, Path(worker_config["run_dir"]), registration_reply.header.run, worker_config["index"]
        )
    except Exception as e:
        fields, frames = failure(e)
        connection.send(pack(Header(VERSION, "failed", registration_reply.header.run, fields=fields), frames))
        raise


def announce(connection: Connection, runtime: WorkerRuntime, digest: bool = False) -> None:
    """Say that this worker is ready, and by what it has. digest: also of the data."""
    problem, e = runtime.problem, runtime.problem.experiment
    data = problem.data_digest if digest else ""
    has = WorkerManifest(data, plugins.sources((e.algo, e.model, e.dataset)))
    fields, frames = blob("ready", msgspec.json.encode(has))
    connection.send(pack(Header(VERSION, "ready", runtime.run, fields=fields), frames))


def warm_up(problem: Problem) -> None:
    """Train on two blank examples: first calls of forward, backward and optimiser cost milliseconds."""
    net, shape = problem.net, problem.dataset.train_inputs.shape[1:]
    stored = problem.dataset.train_targets
    targets = torch.from_numpy(np.zeros((2, *stored.shape[1:]), stored.dtype)).to(net.device)
    blank = Shard(net, torch.zeros((2, *shape), device=net.device), targets, 1.0)
    minimise(blank, problem.start, how=LocalTraining(epochs=1), rng=RandomStream(0, "warm up"))


def serve(
    connection: Connection,
    runtime: WorkerRuntime,
    handle: Callable[[Envelope], list[Envelope]],
    idle: float | None = None,
) -> None:
    """Until 'stop'. idle: seconds of silence after which to speak up; None: wait on, as a worker of this
    machine does, which the kernel ends with its coordinator.

    Raises:
        AccessError: if the coordinator refuses.
        ConnectionLost: if the connection has ended.
    """
    heartbeat = Heartbeat(connection)
    runtime.problem.net.module.register_forward_pre_hook(heartbeat)
    while True:
        envelope = connection.receive(idle or 60.0)
        if envelope is None:
            if idle:  # about no task: it renews no lease, for a task may have been lost on its way
                connection.offer(pack(Header(VERSION, "heartbeat", runtime.run)))
            continue
        if envelope.header.kind == "stop":
            return
        if envelope.header.kind == "refused":
            raise AccessError(f"refused: {bytes(envelope.frames[0]).decode(errors='replace')}")
        heartbeat.begin(envelope.header)
        replies = handle(envelope)
        heartbeat.end()
        for reply in replies:
            connection.send(reply)


if __name__ == "__main__":
    with open(int(sys.argv[1]), "rb") as handed:
        sys.exit(run(json.load(handed)))
