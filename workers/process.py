"""A worker process from its first connection to its last letter."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from fedsim.experiment import Experiment, build_algorithm, convert
from fedsim.learning.shard import Shard
from fedsim.learning.solvers import LocalTraining, minimise
from fedsim.problem import Problem
from fedsim.seeds import Stream
from fedsim.wire.letter import VERSION, Header, Letter, blob, seal
from protocols import find
from workers.connection import Connection, Hello
from workers.memory import settle
from workers.numerics import fix_numerics
from workers.worker import WorkerRuntime, failure

JOIN_DEADLINE = 120.0


def run(spec: dict[str, Any]) -> int:
    """Connect, set up, serve until 'stop'. Returns the exit code; errors go to the log."""
    connection = Connection(
        spec["address"], Hello(spec["token"], spec["index"], os.getpid()), spec["max_frame"]
    )
    try:
        welcome = connection.receive(JOIN_DEADLINE)
        if welcome is None or welcome.header.kind != "welcome":
            print(f"no welcome from the coordinator within {JOIN_DEADLINE:g} s", file=sys.stderr)
            return 4
        try:
            runtime = _set_up(welcome, spec)
        except Exception as e:
            traceback.print_exc()
            fields, frames = failure(e)
            connection.send(seal(Header(VERSION, "failed", welcome.header.run, fields=fields), frames))
            connection.close(linger=5.0)
            return 1
        settle()
        fields, frames = blob("ready", b"")
        connection.send(seal(Header(VERSION, "ready", welcome.header.run, fields=fields), frames))
        _serve(connection, runtime)
        return 0
    finally:
        connection.close(linger=1.0)


def _set_up(welcome: Letter, spec: dict[str, Any]) -> WorkerRuntime:
    orders = msgspec.json.decode(bytes(welcome.frames[0]))
    experiment = convert(Experiment, orders["experiment"], "the coordinator's experiment")
    algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
    fix_numerics(experiment.threads, spec["device"])
    data_dir = Path(orders["data_dir"]) if orders["data_dir"] else None
    problem = Problem.build(experiment, algorithm, data_dir, spec["device"])
    warm_up(problem)
    return WorkerRuntime(problem, Path(orders["run_dir"]), welcome.header.run, spec["index"])


def warm_up(problem: Problem) -> None:
    """Train on two blank examples: first calls of forward, backward and optimiser cost milliseconds."""
    net, shape = problem.net, problem.dataset.train_inputs.shape[1:]
    stored = problem.dataset.train_targets
    targets = torch.from_numpy(np.zeros((2, *stored.shape[1:]), stored.dtype)).to(net.device)
    blank = Shard(net, torch.zeros((2, *shape), device=net.device), targets, 1.0)
    minimise(blank, problem.start, how=LocalTraining(epochs=1), rng=Stream(0, "warm up"))


def _serve(connection: Connection, runtime: WorkerRuntime) -> None:
    """Until 'stop'. A worker that hears nothing waits on: the kernel ends it with its coordinator."""
    while True:
        letter = connection.receive(60.0)
        if letter is None:
            continue
        if letter.header.kind == "stop":
            return
        connection.send(runtime.handle(letter))


if __name__ == "__main__":
    with open(int(sys.argv[1]), "rb") as handed:
        sys.exit(run(json.load(handed)))
