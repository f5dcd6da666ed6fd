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
from fedsim.wire.envelope import Letter
from workers.state_transfer import Borrower
from workers.storage.scratch import Scratch
from workers.transport.dealer import Connection, Credentials, Hello, KeyRefused
from workers.transport.join_credentials import Invitation
from workers.worker.main import IDLE, JOIN_DEADLINE, announce, serve, set_up

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Visit:
    """url: where the coordinator is, seen from here. worker: as which to come, None: as the first that is
    missing. patience: seconds to wait for it to answer."""

    invitation: Invitation
    url: str
    data_dir: Path | None
    patience: float
    worker: int | None = None

    def run(self, tell: Tell) -> None:
        """Join and serve until the run is over; join again if the connection is lost on the way.

        Errors: AccessError if the run refuses this worker, TaskError if the coordinator does not answer, and
        whatever setting up raises.
        """
        mine: int | None = None
        patience = 0.0
        while True:
            try:
                mine, connection, welcome = self._join(mine, patience)
                self._serve(connection, welcome, tell)
                break
            except ConnectionLost as e:
                tell(f"{e}; joining again")
                patience = self.patience
        tell("the run is over")

    def _serve(self, connection: Connection, welcome: Letter, tell: Tell) -> None:
        """Errors: ConnectionLost, besides those of run."""
        with ExitStack() as closing:
            closing.callback(connection.close, linger=1.0)
            if welcome.header.kind == "stop":  # it came as the run ended
                return
            orders = msgspec.json.decode(bytes(welcome.frames[0]))
            experiment = orders["experiment"]
            run, index = welcome.header.run, orders["index"]
            tell(f"worker {index} of run {run}: {experiment['algo']} on {experiment['dataset']}")
            states = Scratch("fedsim-worker-")
            closing.callback(states.remove)
            data_dir = str(self.data_dir) if self.data_dir else None
            orders |= {"run_dir": str(states.path), "data_dir": data_dir}
            runtime = set_up(connection, welcome, orders, experiment["device"])
            announce(connection, runtime, digest=True)
            serve(connection, runtime, Borrower(runtime).handle, idle=IDLE)

    def _join(self, mine: int | None, patience: float) -> tuple[int, Connection, Letter]:
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

    def _try_all(self, mine: int | None) -> tuple[int, Connection, Letter]:
        """As itself, else as the first worker that is missing.

        Errors: KeyRefused, also if another's key would do but its own does not; AccessError, TaskError,
        ConnectionLost.
        """
        everybody = range(len(self.invitation.workers))
        if self.worker is not None and self.worker not in everybody:
            raise AccessError(f"--worker {self.worker}: the run has workers 0 to {len(everybody) - 1}")
        mine = self.worker if mine is None else mine
        seats = sorted(everybody, key=lambda i: i != mine) if self.worker is None else [self.worker]
        nobodys: list[KeyRefused] = []
        for index in seats:
            try:
                connection = self._connect(index)
            except KeyRefused as e:
                if index == mine:
                    raise
                nobodys.append(e)
                continue
            answer = self._answer(connection)
            if answer.header.kind != "refused":
                return index, connection, answer
            connection.close()
            said = bytes(answer.frames[0]).decode(errors="replace")
        if len(nobodys) == len(seats):
            raise nobodys[0]
        if len(seats) == 1:
            raise AccessError(f"refused: {said}")
        others = f", but for {len(nobodys)} whose key is not accepted (any longer)" if nobodys else ""
        raise AccessError(f"refused: all {len(seats)} workers of the run have joined already{others}")

    def _answer(self, connection: Connection) -> Letter:
        """To a hello: 'welcome', 'refused' or 'stop'. Errors: TaskError, ConnectionLost."""
        try:
            answer = connection.receive(JOIN_DEADLINE)
            if answer is None or answer.header.kind not in ("welcome", "refused", "stop"):
                raise TaskError(f"no welcome from the coordinator within {JOIN_DEADLINE:g} s")
        except BaseException:
            connection.close()
            raise
        return answer

    def _connect(self, index: int) -> Connection:
        keys, invitation = self.invitation.workers[index], self.invitation
        credentials = Credentials(keys.public.encode(), keys.secret.encode(), invitation.server_key.encode())
        hello = Hello("", index, os.getpid(), platform.node())
        return Connection(self.url, hello, invitation.max_frame, credentials, self.patience)
