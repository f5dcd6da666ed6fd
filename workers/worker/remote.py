"""`fedsim worker --join FILE`: a worker on another machine, or in another container.

It has no folder in common with the coordinator. It comes in with a key of the join file, reads the data
set from its own folder, borrows clients' states and sends drafts back (workers.state_transfer).
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedsim.errors import AccessError, ConnectionLost, TaskError
from fedsim.wire.envelope import Envelope
from workers.scratch import Scratch
from workers.state_transfer import RemoteStateCache
from workers.transport.dealer import Connection, CurveKeys, Hello, KeyRefused
from workers.transport.join_credentials import JoinCredentials
from workers.worker.main import IDLE, JOIN_DEADLINE, announce, serve, set_up

Notify = Callable[[str], None]


@dataclass(frozen=True)
class RemoteWorker:
    """url: where the coordinator is, seen from here. worker: as which to come, None: as the first that is
    missing. patience: seconds to wait for it to answer."""

    join_credentials: JoinCredentials
    url: str
    data_dir: Path | None
    patience: float
    worker: int | None = None

    def run(self, notify: Notify) -> None:
        """Join and serve until the run is over; join again if the connection is lost on the way.

        Raises:
            AccessError: if the run refuses this worker.
            TaskError: if the coordinator does not answer, and whatever setting up raises.
        """
        mine: int | None = None
        patience = 0.0
        while True:
            try:
                mine, connection, registration_reply = self._join(mine, patience)
                self._serve(connection, registration_reply, notify)
                break
            except ConnectionLost as e:
                notify(f"{e}; joining again")
                patience = self.patience
        notify("the run is over")

    def _serve(self, connection: Connection, registration_reply: Envelope, notify: Notify) -> None:
        """See below.

        Raises:
            ConnectionLost: besides those of run.
        """
        with ExitStack() as closing:
            closing.callback(connection.close, linger=1.0)
            if registration_reply.header.kind == "stop":  # it came as the run ended
                return
            worker_config = msgspec.json.decode(bytes(registration_reply.frames[0]))
            experiment = worker_config["experiment"]
            run, index = registration_reply.header.run, worker_config["index"]
            notify(f"worker {index} of run {run}: {experiment['algo']} on {experiment['dataset']}")
            states = Scratch("fedsim-worker-")
            closing.callback(states.remove)
            data_dir = str(self.data_dir) if self.data_dir else None
            worker_config |= {"run_dir": str(states.path), "data_dir": data_dir}
            runtime = set_up(connection, registration_reply, worker_config, experiment["device"])
            announce(connection, runtime, digest=True)
            serve(connection, runtime, RemoteStateCache(runtime).handle, idle=IDLE)

    def _join(self, mine: int | None, patience: float) -> tuple[int, Connection, Envelope]:
        """As which worker, a connection that was let in, and the welcome, or 'stop'.

        mine: the worker that this one has been, and will be again if it can. patience: how long to try again
        if all are there already. Whoever was cut off may be one of them: the other side finds out a little
        later.
        """
        until = time.monotonic() + patience
        while True:
            try:
                return self._try_all(mine)
            except KeyRefused:
                raise
            except AccessError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def _try_all(self, mine: int | None) -> tuple[int, Connection, Envelope]:
        """As itself, else as the first worker that is missing.

        Raises:
            KeyRefused: also if another's key would do but its own does not.
            AccessError: if access is refused.
            TaskError: if a task or a worker fails.
            ConnectionLost: if the connection has ended.
        """
        everybody = range(len(self.join_credentials.workers))
        if self.worker is not None and self.worker not in everybody:
            raise AccessError(f"--worker {self.worker}: the run has workers 0 to {len(everybody) - 1}")
        mine = self.worker if mine is None else mine
        seats = sorted(everybody, key=lambda i: i != mine) if self.worker is None else [self.worker]
        refused_keys: list[KeyRefused] = []
        for index in seats:
            try:
                connection = self._connect(index)
            except KeyRefused as e:
                if index == mine:
                    raise
                refused_keys.append(e)
                continue
            answer = self._answer(connection)
            if answer.header.kind != "refused":
                return index, connection, answer
            connection.close()
            output = bytes(answer.frames[0]).decode(errors="replace")
        if len(refused_keys) == len(seats):
            raise refused_keys[0]
        if len(seats) == 1:
            raise AccessError(f"refused: {output}")
        others = (
            f", but for {len(refused_keys)} whose key is not accepted (any longer)" if refused_keys else ""
        )
        raise AccessError(f"refused: all {len(seats)} workers of the run have joined already{others}")

    def _answer(self, connection: Connection) -> Envelope:
        """To a hello: 'welcome', 'refused' or 'stop'.

        Raises:
            TaskError: if a task or a worker fails.
            ConnectionLost: if the connection has ended.
        """
        try:
            answer = connection.receive(JOIN_DEADLINE)
            if answer is None or answer.header.kind not in ("welcome", "refused", "stop"):
                raise TaskError(f"no welcome from the coordinator within {JOIN_DEADLINE:g} s")
        except BaseException:
            connection.close()
            raise
        return answer

    def _connect(self, index: int) -> Connection:
        keys, join_credentials = self.join_credentials.workers[index], self.join_credentials
        curve_keys = CurveKeys(
            keys.public.encode(), keys.secret.encode(), join_credentials.server_key.encode()
        )
        hello = Hello("", index, os.getpid(), platform.node())
        return Connection(self.url, hello, join_credentials.max_frame, curve_keys, self.patience)
