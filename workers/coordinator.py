"""The coordinator: carries out what the round machine decides.

It waits in Endpoint.wait, on sockets and process handles, with a deadline; the disk and the fold have
deadlines of their own.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from fedsim import rounds
from fedsim.errors import DiskError, FedsimError, TaskError, WireError
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.problem import Problem
from fedsim.rounds import (
    Arrived,
    Close,
    Command,
    Commit,
    Drop,
    Event,
    Finish,
    Folded,
    Give,
    Joined,
    Open,
    ProtocolError,
    Release,
    RoundMachine,
    Scored,
)
from fedsim.schedules import Schedule
from fedsim.wire.ledger import Entry, stream_bytes
from fedsim.wire.letter import NONE, VERSION, Header, Letter, Payload, blob, decode_own, encode, seal
from fedsim.wire.messages import check_values
from workers.crew import Crew, Death
from workers.endpoint import Endpoint, Incoming
from workers.folding import Folder
from workers.journal import Journal
from workers.scoreboard import Scoreboard
from workers.simulated import Simulated
from workers.spool import Spool
from workers.store import Checkpoints
from workers.wakeup import Wakeup
from workers.worker import task_of, to_evaluate, unpack_score

JOIN_DEADLINE = 120.0
DEATH_DEADLINE = 1.0


class Observer(Protocol):
    """Who writes and shows what happens."""

    def committed(self, commit: Commit, entries: list[Entry]) -> None: ...

    def evaluated(self, metrics: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """The end of a run that was not an error."""

    server: Any
    model: Point | Gaussian
    versions: tuple[int, ...]
    seconds_to_first_round: float
    seconds_rounds: tuple[float, ...]
    seconds_clients: float
    kernel_residual: Mapping[str, int] | None = None
    """The kernel's count of the streams minus the ledger's, before the workers are told to stop."""


class Coordinator:
    """One run from its first broadcast to its last score."""

    def __init__(
        self,
        problem: Problem,
        endpoint: Endpoint,
        crew: Crew,
        checkpoints: Checkpoints,
        schedule: Schedule,
        observer: Observer,
        journal: Journal,
        *,
        run: str,
        workers: int,
        orders: Mapping[str, Any],
        started: float,
        patience: float,
    ) -> None:
        self.problem, self.endpoint, self.crew = problem, endpoint, crew
        self.checkpoints, self.observer, self.journal = checkpoints, observer, journal
        self.run_name, self.workers, self.orders, self.started = run, workers, orders, started
        self.patience = patience
        """Seconds in which something has to happen: the longest task, generously."""
        experiment = problem.experiment
        self.machine = RoundMachine(
            rounds=experiment.rounds,
            exchanges=len(problem.algorithm.exchanges),
            schedule=schedule,
            versions=[0] * len(problem.clients),
            cost=lambda k: problem.sizes[k],
            chunks=problem.chunks,
            eval_every=experiment.eval_every,
            setup=len(problem.algorithm.setup),
        )
        self.server: Any = problem.algorithm.server_init(problem.context(0, 0))
        self._wakeup = Wakeup()
        self.spool = Spool(checkpoints.folder.parent / "spool")
        self.folder = Folder(problem, self.spool.take, self._wakeup.set)
        self._payload = Payload((), ())
        self.simulated = Simulated(problem.clock, problem.sizes)
        self.board = Scoreboard(problem.chunks, observer.evaluated, problem.measure)
        setup = problem.algorithm.setup
        start = self.board.open(0, tuple(range(len(problem.clients))) if setup else ())
        start.model, start.committed = self._model(), not setup
        self._models_sent: dict[int, int] = {}
        self._joined = 0
        self._round_began = time.monotonic()
        self._commits: list[float] = []
        self._first_round = 0.0
        self._seconds_clients = 0.0
        self._finished = False

    # ---- the loop

    def run(self) -> Outcome:
        """Errors: TaskError naming worker, client and round; Interrupted; DiskError."""
        try:
            self._join()
            self._round_began = time.monotonic()
            self._carry_out(self.machine.start())
            for worker in range(max(1, self.workers)):
                self._handle(Joined(worker))
            while not self._finished:
                if not self._step(self.patience):
                    raise self._silence()
        finally:
            self.folder.stop()
            self._wakeup.close()
        residual = self.endpoint.residual()
        self._stop_workers()
        algorithm, problem = self.problem.algorithm, self.problem
        return Outcome(
            self.server,
            algorithm.model(self.server, problem.context(self.machine.round, 0)),
            tuple(self.machine.versions),
            self._first_round,
            tuple(self._commits),
            self._seconds_clients,
            residual,
        )

    def _join(self) -> None:
        """Wait until every worker is ready. In process there is nobody to wait for."""
        deadline = time.monotonic() + JOIN_DEADLINE
        while self._joined < self.workers:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TaskError(
                    f"only {self._joined} of {self.workers} workers were ready after {JOIN_DEADLINE:g} s"
                )
            self._step(left)
        self.endpoint.close_door()

    def _step(self, timeout: float) -> bool:
        """Wait once and handle whatever came; False if nothing did."""
        incoming, ready = self.endpoint.wait([self._wakeup.fd, *self.crew.fds()], timeout)
        for letter in incoming:
            self._receive(letter)
        if self._wakeup.fd in ready and self._wakeup.clear():
            self._take_fold()
        death = self.crew.check(ready)
        if death is not None:
            raise self._death(death)
        return bool(incoming or ready)

    def _handle(self, event: Event) -> None:
        self._carry_out(self.machine.handle(event))

    # ---- what comes in

    def _receive(self, incoming: Incoming) -> None:
        worker, letter = incoming.worker, incoming.letter
        h = letter.header
        if h.kind == "hello":
            fields, frames = blob("welcome", msgspec.json.encode(dict(self.orders)))
            self._send(worker, Header(VERSION, "welcome", self.run_name, fields=fields), frames)
        elif h.run != self.run_name:
            raise TaskError(f"worker {worker} answers for run {h.run!r}; this is {self.run_name!r}")
        elif h.kind == "ready":
            self._joined += 1
        elif h.kind == "failed":
            raise self._failure(worker, letter)
        elif h.kind == "upload":
            self._upload(worker, letter)
        elif h.kind == "absent":
            self._absent(worker, letter)
        elif h.kind == "score":
            self._scored(worker, letter)
        else:
            raise TaskError(f"worker {worker} sent a letter of kind {h.kind!r}")

    def _upload(self, worker: int, letter: Letter) -> None:
        task = task_of(letter)
        if self.machine.holder(task) != worker:
            raise TaskError(f"worker {worker} uploaded {task}, which it does not hold")
        digests = [p.digest for f in letter.header.fields for p in f.parts]
        self.journal.append(
            "upload",
            round=task.round,
            exchange=task.exchange,
            client=task.client,
            worker=worker,
            xxh3=digests,
        )
        self.spool.put(task.client, letter)
        seconds = letter.header.micros / 1e6
        self.board[task.round].seconds_clients += seconds
        self._seconds_clients += seconds
        late = self.simulated.late(task, stream_bytes(letter))
        if late:
            about = self.board[task.round]
            about.late = tuple(sorted({*about.late, task.client}))
        self._handle(Arrived(worker, task, late))

    def _close_exchange(self, round: int) -> None:
        """Add what the exchange took on the virtual clock to its round."""
        seconds, about = self.simulated.close(), self.board[round]
        if seconds is not None:
            about.simulated = (about.simulated or 0.0) + seconds

    def _absent(self, worker: int, letter: Letter) -> None:
        """A client that the schedule takes out after the download."""
        task = task_of(letter)
        self.journal.append("gone", round=task.round, client=task.client)
        try:
            self._handle(Arrived(worker, task))
        except ProtocolError as e:
            raise TaskError(str(e)) from None

    def _take_fold(self) -> None:
        try:
            fold = self.folder.result()
        except FedsimError as e:
            raise TaskError(f"round {self.machine.round} cannot be folded: {e}") from e
        self.server = fold.server
        self.board[self.machine.round].report(fold.scalars)
        self._handle(Folded())

    def _scored(self, worker: int, letter: Letter) -> None:
        h = letter.header
        if h.round not in self.board:
            raise TaskError(f"worker {worker} scored round {h.round}, which nobody asked for")
        about = self.board[h.round]
        about.sampled = bool(self.problem.eval_samples) and isinstance(about.model, Gaussian)
        width = self.problem.measure.width(self.problem.dataset.classes)
        try:
            about.scores[h.exchange] = unpack_score(letter, width, about.sampled)
        except WireError as e:
            raise TaskError(f"worker {worker} sent an unreadable score of round {h.round}: {e}") from None
        self.board.flush()
        try:
            self._handle(Scored(worker, h.round, h.exchange))
        except ProtocolError as e:
            raise TaskError(str(e)) from None

    # ---- what goes out

    def _carry_out(self, commands: list[Command]) -> None:
        """In order, except that the files of a commit are written after the next round is on its way."""
        committed: list[Commit] = []
        for command in commands:
            match command:
                case Open():
                    self._open(command)
                case Give(worker, task, gone):
                    kind = "gone" if gone else "task"
                    header = Header(
                        VERSION, kind, self.run_name, 1, task.round, task.exchange, task.client, task.base
                    )
                    self._give(worker, header)
                case rounds.Score(worker, round, chunk):
                    self._give_score(worker, round, chunk)
                case Release(client):
                    self.folder.release(client)
                case Drop(client):
                    self.journal.append("lost", round=self.machine.round, client=client)
                    self.spool.take(client)
                case Close():
                    self.folder.close()
                case Commit():
                    self._commit(command)
                    committed.append(command)
                case Finish():
                    self._finished = True
        for commit in committed:
            self._record(commit)
        if committed:
            self.board.flush()

    def _open(self, command: Open) -> None:
        """Encode the broadcast once; the fold computes from the decoded broadcast, as clients do."""
        problem, algorithm = self.problem, self.problem.algorithm
        if command.exchange == 1:
            self.board.open(command.round, command.participants)
        else:
            self._close_exchange(command.round)
        self.journal.append(
            "open", round=command.round, exchange=command.exchange, participants=list(command.participants)
        )
        down = algorithm.broadcast(self.server, problem.context(command.round, command.exchange))
        codecs, layout = problem.codecs["down"], problem.net.layout
        self._payload = encode(down, codecs, problem.dims, layout=layout)
        sent = decode_own(type(down), self._payload, codecs, problem.dims, layout=layout)
        check_values(sent, f"the server's broadcast of round {command.round}")
        if command.folds:
            self.folder.start(self.server, sent, command.round, command.exchange)

    def _give(self, worker: int, header: Header) -> None:
        """The broadcast as it was encoded once, and behind it what only this client gets."""
        payload, problem = self._payload, self.problem
        ctx = problem.context(header.round, header.exchange)
        extra = problem.algorithm.broadcast_to(self.server, header.client, ctx)
        if extra is not None:
            own = encode(extra, problem.codecs["down"], problem.dims, layout=problem.net.layout)
            payload = Payload(payload.fields + own.fields, payload.frames + own.frames)
        self.simulated.gave(header.client, self._send(worker, header, payload.frames, payload.fields))

    def _give_score(self, worker: int, round: int, chunk: int) -> None:
        payload = Payload((), ())
        if self._models_sent.get(worker) != round:
            model = self.board[round].model
            assert model is not None  # taken at the round's commit, before any Score command
            evaluate = to_evaluate(model, self.problem.eval_samples)
            payload = encode(evaluate, {}, self.problem.dims)
            self._models_sent[worker] = round
        header = Header(VERSION, "evaluate", self.run_name, 1, round, chunk)
        self._send(worker, header, payload.frames, payload.fields)

    def _send(self, worker: int, header: Header, frames: Any = (), fields: Any = None) -> int:
        """Returns the letter's bytes on the stream."""
        if fields is not None:
            header = msgspec.structs.replace(header, fields=fields)
        letter = seal(header, frames)
        try:
            self.endpoint.send(worker, letter)
        except TaskError:
            # the worker is gone and its death is about to be known: that says more
            death = self.crew.check(select.select(self.crew.fds(), [], [], DEATH_DEADLINE)[0])
            if death is None:
                raise
            raise self._death(death) from None
        return stream_bytes(letter)

    def _commit(self, command: Commit) -> None:
        """The round is folded: hand the checkpoint over, remember the model, take the time."""
        r, now = command.round, time.monotonic()
        about = self.board.open(r, command.participants)
        about.folded = command.folded
        self._close_exchange(r)
        self.journal.append("commit", round=r, folded=list(command.folded))
        self.checkpoints.commit(r, self.server, command.versions, command.folded)
        about.seconds, self._round_began = now - self._round_began, now
        if r:
            self._commits.append(about.seconds)
        if r == 1:
            self._first_round = time.time() - self.started
        about.report(self.problem.algorithm.report(self.server, self.problem.context(r, 0)))
        if r:  # the set-up does not change the start model, which is being evaluated
            about.model = self._model()

    def _record(self, commit: Commit) -> None:
        """Ledger rows of a committed round, and its traffic for metrics.jsonl."""
        r, ledger = commit.round, self.endpoint.ledger
        self.observer.committed(commit, ledger.close(r))
        about = self.board[r]
        about.bytes_down, about.bytes_up = ledger.rounds[r, "down"], ledger.rounds[r, "up"]
        about.committed = True
        if not self.machine.evaluates(r):
            self.board.drop(r)

    def _model(self) -> Point | Gaussian:
        return self.problem.algorithm.model(self.server, self.problem.context(0, 0))

    def _stop_workers(self) -> None:
        for worker in range(self.workers):
            with suppress(TaskError):  # a worker that is gone already has no more to do
                self.endpoint.send(worker, seal(Header(VERSION, "stop", self.run_name)))

    # ---- what goes wrong

    def _silence(self) -> TaskError:
        held = {w: self.machine.held_by(w) for w in range(max(1, self.workers))}
        who = "; ".join(
            f"worker {w} holds " + ", ".join(f"client {t.client}" for t in tasks)
            for w, tasks in held.items()
            if tasks
        )
        return TaskError(
            f"nothing has happened for {self.patience:g} s in round {self.machine.round}: "
            f"{who or 'no worker holds a task, so the fold hangs'} (raise the limit with --patience)"
        )

    def _death(self, death: Death) -> TaskError:
        held = self.machine.held_by(death.worker)
        doing = (
            f"in round {held[0].round}, at client {held[0].client}"
            + (f" (next: {', '.join(str(t.client) for t in held[1:])})" if held[1:] else "")
            if held
            else f"in round {self.machine.round}, between tasks"
        )
        return TaskError(f"worker {death.worker} {death.how} {doing}.\n{death.last_words}")

    def _failure(self, worker: int, letter: Letter) -> FedsimError:
        h = letter.header
        code, what = msgspec.json.decode(letter.frames[0], type=tuple[int, str])
        kind = DiskError if code == DiskError.exit_code else TaskError
        if h.round == NONE:
            return kind(f"worker {worker} could not set itself up:\n{what.rstrip()}")
        if h.client == NONE:
            return kind(f"worker {worker} failed to evaluate round {h.round}:\n{what.rstrip()}")
        return kind(f"worker {worker} failed on client {h.client} in round {h.round}:\n{what.rstrip()}")
