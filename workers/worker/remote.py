"""`fedsim worker --join FILE`: a worker on another machine, or in another container.

The worker shares no folder with the coordinator. It joins with a key from the join file, reads the data set
from a local folder, receives clients' states, and sends their next states (drafts) back. A client stays with
its worker, so states are rarely sent.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fedsim.errors import AccessError, ConnectionLost, FedsimError, TaskError, WireError
from fedsim.printable import one_line
from fedsim.problem import Problem
from fedsim.wire.envelope import Envelope
from workers import protocol_messages as messages
from workers.scratch import Scratch
from workers.transport.dealer import Connection, CurveKeys, KeyRefused
from workers.transport.handshake import Hello, refusal_reason
from workers.transport.join_credentials import JoinCredentials
from workers.transport.tcp_address import checked_url
from workers.worker.local_files import LocalFiles, names_elsewhere
from workers.worker.main import IDLE, JOIN_DEADLINE, UNANSWERED, announce, check_over, reported, serve, set_up
from workers.worker.runtime import WorkerRuntime
from workers.worker.seats import SeatLocks

Notify = Callable[[str], None]


@dataclass(frozen=True)
class RemoteWorker:
    """A worker that is not on the coordinator's machine.

    url: the coordinator's address as seen from here. worker: the worker's number; None: the first missing
    one. patience: seconds to wait for the coordinator's answer. files: the paths of the user's files here.
    locks: the locks on the join file, for processes that share the file and have no number.
    """

    join_credentials: JoinCredentials
    url: str
    data_dir: Path | None
    patience: float
    worker: int | None = None
    files: LocalFiles = LocalFiles()
    locks: SeatLocks = field(default_factory=lambda: SeatLocks(None))

    def run(self, notify: Notify) -> None:
        """Join and serve until the run is over; reconnect if the connection is lost.

        Raises:
            AccessError: if the run refuses this worker.
            TaskError: if the coordinator does not answer, or the set-up fails.
            UsageError: if a user's file is missing here.
            Interrupted: if the run was interrupted, and has rounds left.
        """
        mine: int | None = None
        patience, again = 0.0, False
        while True:
            try:
                mine, connection, reply = self.join(mine, patience, again)
                with ExitStack() as closing:
                    closing.callback(connection.close, linger=1.0)
                    if reply.header.kind == "stop":  # the run ended during the join
                        check_over(reply)
                    else:
                        self._serve(connection, reply, notify)
                break
            except ConnectionLost as e:
                notify(f"{e}; joining again")
                patience, again = self.patience, True
        notify("the run is over")

    def _serve(self, connection: Connection, welcome: Envelope, notify: Notify) -> None:
        run = welcome.header.run
        with ExitStack() as closing:
            with reported(connection, run):
                config = messages.read_welcome(welcome)
                experiment = config.experiment
                what = f"{experiment.get('algo')} on {experiment.get('dataset')}"
                notify(f"worker {config.index} of run {run}: {what}")
                states = Scratch("fedsim-worker-")
                closing.callback(states.remove)
                data_dir = str(self.data_dir) if self.data_dir else None
                local = self.files.localised(experiment)
                config = msgspec.structs.replace(
                    config, experiment=local, run_dir=str(states.path), data_dir=data_dir
                )
                runtime = set_up(connection, run, config, experiment.get("device", "cpu"))
                names = names_elsewhere(experiment, local)
                announce(connection, runtime.problem, run, digest=True, names=names)
            serve(connection, runtime, partial(replies_with_states, runtime), idle=IDLE)

    def join(self, mine: int | None, patience: float, again: bool) -> tuple[int, Connection, Envelope]:
        """Join; return the worker's number, its connection, and the 'welcome' or 'stop' envelope.

        mine: the number that this process had and tries first. patience: seconds to retry if all workers have
        joined, because the coordinator may not have noticed yet that this worker's connection was lost.
        again: True if this worker was connected before.
        """
        until = time.monotonic() + patience
        while True:
            try:
                return self._try_all(mine, again)
            except KeyRefused:
                raise
            except AccessError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def _try_all(self, mine: int | None, again: bool) -> tuple[int, Connection, Envelope]:
        """Join with the worker's own or previous number, or else as the first missing worker."""
        indices = self.join_credentials.seats
        if self.worker is not None and self.worker not in indices:
            raise AccessError(f"seat {self.worker}: this file has the workers {indices[0]} to {indices[-1]}")
        mine = self.worker if mine is None else mine
        candidates = sorted(indices, key=lambda i: i != mine) if self.worker is None else [self.worker]
        refused_keys: list[KeyRefused] = []
        reason = "another process of this machine has joined with each key of the file"
        for index in self.locks.free(candidates):
            try:
                connection = self._connect(index, again)
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
        if len(refused_keys) == len(candidates):
            raise refused_keys[0]
        if len(candidates) == 1:
            raise AccessError(f"refused: {reason}")
        refused = len(refused_keys)
        others = f", but for {refused} whose key is not accepted (any longer)" if refused else ""
        raise AccessError(f"refused: all {len(candidates)} workers of the run have joined already{others}")

    def _answer(self, connection: Connection) -> Envelope:
        """Return the answer to the hello: 'welcome', 'refused' or 'stop'."""
        deadline = min(JOIN_DEADLINE, max(self.patience, UNANSWERED * IDLE))
        try:
            answer = connection.receive(deadline)
            if answer is None or answer.header.kind not in ("welcome", "refused", "stop"):
                raise TaskError(f"no welcome from the coordinator within {deadline:g} s")
        except BaseException:
            connection.close()
            raise
        return answer

    def _connect(self, index: int, again: bool) -> Connection:
        join_credentials = self.join_credentials
        keys = join_credentials.pair(index)
        curve_keys = CurveKeys.of(keys, join_credentials.server_key)
        hello = Hello("", index, os.getpid(), platform.node())
        again = again and not join_credentials.lasting
        return Connection(self.url, hello, join_credentials.max_frame, curve_keys, self.patience, again)


def remote_worker(
    join: Path,
    *,
    seat: int | None,
    url: str | None = None,
    data_dir: Path | None = None,
    patience: float = 60.0,
    choices: Mapping[str, Path | None] | None = None,
    codecs: Sequence[Path] = (),
) -> RemoteWorker:
    """Return the worker that a join file and the options of `fedsim worker` describe.

    seat: the worker's number; None: a free one. url: the coordinator's address as seen from here, if the join
    file has another one. patience: seconds to wait for the coordinator's answer. choices, codecs: see
    LocalFiles.

    Raises:
        UsageError: if the join file cannot be read, or is open to others.
        DataError: if the join file is damaged.
    """
    credentials = JoinCredentials.read(join)
    url = checked_url(url, credentials.url, join)
    files = LocalFiles({name: path for name, path in (choices or {}).items() if path}, tuple(codecs))
    locks, folder = SeatLocks(join if seat is None else None), data_dir.resolve() if data_dir else None
    return RemoteWorker(credentials, url, folder, patience, seat, files, locks)


def run_joined(spec: Mapping[str, Any]) -> int:
    """Run one worker of a node agent; return the exit code. Errors are written to the log.

    spec: "join" is the join file, and "seat" the worker's number (None: a free one). "options" has the url,
    data_dir, patience, choices and codecs of `fedsim worker`.
    """
    options = dict(spec["options"])
    data_dir = Path(options["data_dir"]) if options.get("data_dir") else None
    options |= {
        "data_dir": data_dir,
        "choices": {name: Path(file) for name, file in options.get("choices", {}).items()},
        "codecs": [Path(file) for file in options.get("codecs", ())],
    }
    try:
        worker = remote_worker(Path(spec["join"]), seat=spec["seat"], **options)
        worker.run(lambda text: print(one_line(text), flush=True))
    except FedsimError as e:
        print(one_line(f"fedsim: {e}"), file=sys.stderr, flush=True)
        return e.exit_code
    return 0


def replies_with_states(
    runtime: WorkerRuntime, envelope: Envelope, on: Problem | None = None
) -> list[Envelope]:
    """Return the replies of a worker that receives and sends states instead of sharing the run's folder.

    Raises:
        WireError: If a state is damaged.
    """
    h, states = envelope.header, runtime.states
    if h.kind == "state":
        if len(envelope.frames) != 1:
            raise WireError(f"a state of client {h.client} in {len(envelope.frames)} frames")
        states.put(h.client, h.base, bytes(envelope.frames[0]))
        return []
    replies = runtime.replies(envelope, on)
    if not replies or replies[0].header.kind != "upload":
        return replies
    data = states.read(h.client, runtime.problem.messages.version(h.round, h.exchange))
    states.remove(h.client, below=h.base)
    return [messages.draft(h, data), *replies]
