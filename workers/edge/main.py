"""The process of an edge server, from its registration to its end."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedsim.experiment import Experiment, convert
from fedsim.problem import Problem
from fedsim.wire.ledger import Ledger
from workers import protocol_messages as messages
from workers.assembly import assemble
from workers.edge.edge_server import EdgeEndpoint, EdgeServer
from workers.heap import set_malloc_thresholds
from workers.transport.dealer import Connection
from workers.transport.edge_addresses import Address, address_file, write_address
from workers.transport.handshake import Hello
from workers.transport.listeners import LocalTcpListener
from workers.worker.heartbeat import while_it_starts
from workers.worker.main import JOIN_DEADLINE, announce, reported, warm_up

AHEAD = 64
"""The largest number of unread uploads of a worker."""


def run_edge(spec: dict[str, Any]) -> int:
    """Run the edge server described by a spec of launch.processes.fork_server; return the exit code."""

    def connect(hello: Hello) -> Connection:
        mine = Hello(spec["token"], hello.index, hello.pid)
        return Connection(spec["address"], mine, spec["max_frame"])

    root = connect(Hello("", spec["index"], os.getpid()))
    try:
        reply = root.receive(JOIN_DEADLINE)
        if reply is None or reply.header.kind != "welcome":
            print(f"no welcome from the root within {JOIN_DEADLINE:g} s", file=sys.stderr)
            return 4
        run = reply.header.run
        with ExitStack() as closing, reported(root, run):
            config = messages.read_welcome(reply)
            with while_it_starts(root, run):
                problem = build_problem(config)
            path = address_file(Path(config.run_dir or "."), spec["edge"])
            listener = LocalTcpListener()
            endpoint = EdgeEndpoint(Ledger(), listener, spec["max_frame"], AHEAD * spec["max_frame"])
            closing.callback(endpoint.close)
            write_address(path, Address(endpoint.address, listener.token))
            announce(root, problem, run)
            set_malloc_thresholds()
            EdgeServer(problem, run, root, endpoint, connect, path.with_suffix(".spool")).serve()
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        root.close(linger=1.0)


def build_problem(config: messages.WorkerConfig) -> Problem:
    """Build the root's problem with the root's numerics, so that sums have the same bits as at the root."""
    experiment = convert(Experiment, config.experiment, "the root's experiment")
    problem = assemble(experiment, Path(config.data_dir) if config.data_dir else None, "cpu")
    warm_up(problem)
    return problem
