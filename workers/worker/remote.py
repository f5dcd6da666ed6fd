"""`fedsim worker --join FILE`: a worker on another machine, or in another container.

It has no folder in common with the coordinator. It comes in with a key of the join file, reads the data
set from its own folder, is sent clients' states and sends drafts of them back. Clients stay with their
worker, so that a state is rarely sent to it.
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

from fedsim.errors import AccessError, ConnectionLost, TaskError, WireError
from fedsim.wire.envelope import Envelope
from workers import protocol_messages as messages
from workers.scratch import Scratch
from workers.transport.dealer import Connection, CurveKeys, KeyRefused
from workers.transport.handshake import Hello, refusal_reason
from workers.transport.join_credentials import JoinCredentials
from workers.worker.main import IDLE, JOIN_DEADLINE, announce, serve, set_up
from workers.worker.runtime import WorkerRuntime

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
        """Set up what the welcome describes, and serve until 'stop'.

        Raises:
            ConnectionLost: besides those of run.
        """
        with ExitStack() as closing:
            closing.callback(connection.close, linger=1.0)
            if registration_reply.header.kind == "stop":  # it came as the run ended
                return
            run, config = registration_reply.header.run, messages.read_welcome(registration_reply)
            experiment = config.experiment
            notify(
                f"worker {config.index} of run {run}: {experiment.get('algo')} on {experiment.get('dataset')}"
            )
            states = Scratch("fedsim-worker-")
            closing.callback(states.remove)
            data_dir = str(self.data_dir) if self.data_dir else None
            config = msgspec.structs.replace(config, run_dir=str(states.path), data_dir=data_dir)
            runtime = set_up(connection, run, config, experiment.get("device", "cpu"))
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
            reason = refusal_reason(answer)
        if len(refused_keys) == len(seats):
            raise refused_keys[0]
        if len(seats) == 1:
            raise AccessError(f"refused: {reason}")
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


class RemoteStateCache:
    """A WorkerRuntime without the run's folder: it keeps clients' states in a folder of its own."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime = runtime

    def handle(self, envelope: Envelope) -> list[Envelope]:
        """Return the replies, in order.

        Raises:
            WireError: If a state is damaged.
        """
        h, states = envelope.header, self.runtime.states
        if h.kind == "state":
            if len(envelope.frames) != 1:
                raise WireError(f"a state of client {h.client} in {len(envelope.frames)} frames")
            states.put(h.client, h.base, bytes(envelope.frames[0]))
            return []
        reply = self.runtime.handle(envelope)
        if reply.header.kind != "upload":
            return [reply]
        data = states.read(h.client, self.runtime.problem.version(h.round, h.exchange))
        states.remove(h.client, below=h.base)
        return [messages.draft(h, data), reply]
