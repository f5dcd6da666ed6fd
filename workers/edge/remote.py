"""`fedsim edge --join FILE`: an edge server on another machine.

Like a worker, it joins the root with a key from its join file. It opens a port with CURVE keys for its own
workers, which join with `fedsim worker --join`. If the edge server ends, its clients' tasks are computed
again. If it is started again with the same file and port, its workers reconnect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fedsim.problem import Problem
from fedsim.wire.envelope import Envelope
from fedsim.wire.ledger import Ledger
from workers import protocol_messages as messages
from workers.edge.edge_server import EdgeServer
from workers.edge.main import AHEAD, build_problem
from workers.heap import set_malloc_thresholds
from workers.scratch import Scratch
from workers.transport.dealer import Connection, CurveKeys, KeyRefused
from workers.transport.edge_credentials import EdgeCredentials
from workers.transport.handshake import Hello
from workers.transport.join_credentials import FORMAT, REVOKED, JoinCredentials, Revocations
from workers.transport.listeners import CurveListener
from workers.transport.router import ZmqEndpoint
from workers.worker.heartbeat import while_it_starts
from workers.worker.local_files import LocalFiles, names_elsewhere
from workers.worker.main import IDLE, UNANSWERED, announce, check_over, reported
from workers.worker.remote import RemoteWorker

Notify = Callable[[str], None]
WORKERS_PATIENCE = 10.0
"""Seconds to wait for the root when connecting on behalf of a worker, which blocks the edge server."""


@dataclass
class RemoteEdge:
    """An edge server that is not on the root's machine.

    url: the root's address as seen from here. bind: the address at which workers join. workers_file: the path
    of the workers' join file. patience: seconds to wait for the root. files: paths of the user's files here.
    """

    credentials: EdgeCredentials
    url: str
    bind: str
    workers_file: Path
    data_dir: Path | None
    patience: float
    files: LocalFiles = LocalFiles()
    revocations: Revocations = field(init=False)

    def run(self, notify: Notify) -> None:
        """Join and serve until the run is over; join again if the connection to the root is lost.

        Raises:
            AccessError: if the run refuses this edge server.
            TaskError: if the root does not answer, or the set-up fails.
            UsageError: if the port cannot be opened, or a user's file is missing here.
            Interrupted: if the run was interrupted, and has rounds left.
        """
        try:
            self._seat().join_and(self._take_part, notify)
        finally:
            self.workers_file.unlink(missing_ok=True)  # the next start writes a new one

    def _seat(self) -> RemoteWorker:
        """Return a RemoteWorker that joins the root with this edge server's key and number."""
        c = self.credentials
        own = JoinCredentials(
            *(FORMAT, c.run, c.url, c.server_key, c.max_frame, (c.own,), c.numerics), first=c.seat
        )
        return RemoteWorker(own, self.url, self.data_dir, self.patience, c.seat)

    def _take_part(self, connection: Connection, welcome: Envelope, notify: Notify) -> None:
        run = welcome.header.run
        with ExitStack() as closing, reported(connection, run):
            config = messages.read_welcome(welcome)
            scratch = Scratch("fedsim-edge-")
            closing.callback(scratch.remove)
            local = self.files.localised(config.experiment)
            data_dir = str(self.data_dir) if self.data_dir else None
            here = msgspec.structs.replace(config, experiment=local, data_dir=data_dir)
            with while_it_starts(connection, run):
                problem = build_problem(here)
            endpoint = self._listen(scratch.path)
            closing.callback(endpoint.close)
            self.credentials.of_workers(endpoint.address).write(self.workers_file)
            notify(self._described(problem, run))
            names = names_elsewhere(config.experiment, local)
            announce(connection, problem, run, digest=True, names=names)
            set_malloc_thresholds()
            spool, silence = scratch.path / "uploads", UNANSWERED * IDLE
            server = EdgeServer(problem, run, connection, endpoint, self._connect, spool, silence)
            farewell = server.serve()
        check_over(farewell)

    def _described(self, problem: Problem, run: str) -> str:
        tree, c = problem.tree, self.credentials
        assert tree is not None  # the root made the credentials from the tree
        return (
            f"{tree.names[c.edge]} of run {run}, for workers {c.first} to {c.first + len(c.workers) - 1}, at "
            f"{self.bind}: fedsim worker --join {self.workers_file.resolve()}"
        )

    def _listen(self, folder: Path) -> ZmqEndpoint:
        """Open the port for workers. After a lost connection, reopen the same port."""
        c, keys = self.credentials, folder / "keys"
        keys.mkdir()  # Revocations locks its folder; `folder` is already locked by Scratch
        self.revocations = Revocations(keys / REVOKED)
        listener = CurveListener(self.bind, c.port, c.workers, self.revocations, c.first)
        endpoint = ZmqEndpoint(Ledger(), listener, c.max_frame, AHEAD * c.max_frame)
        self.bind = endpoint.address
        return endpoint

    def _connect(self, hello: Hello) -> Connection:
        """Open a connection to the root for a worker.

        A key that the root does not accept is revoked here, too.
        """
        c = self.credentials
        pair = c.workers[hello.index - c.first]
        curve_keys = CurveKeys.of(pair, c.server_key)
        mine = Hello("", hello.index, hello.pid, hello.host)
        try:
            return Connection(self.url, mine, c.max_frame, curve_keys, WORKERS_PATIENCE)
        except KeyRefused:
            self.revocations.add([hello.index])
            raise
